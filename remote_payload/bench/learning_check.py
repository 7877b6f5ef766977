"""Is the trainer's tau that of real speculative decoding? One export, two programs, one text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from trainer.target_loading import load_target

from bench import greedy_loop
from bench.common import say
from bench.learning_target import load
from bench.learning_text import END
from trainer import acceptance
from trainer.data import Document, load_corpus, load_tokenizer
from trainer.export import load_export

TOLERANCE = 0.02  # between the two values of tau


def check(
    target: Path,
    export: Path,
    heldout: Path,
    *,
    prompt: int,
    tokens: int,
    documents: int,
    device: torch.device,
) -> dict[str, Any]:
    """Both values of tau on the first `documents` held-out prompts, and whether every text agrees.

    The text is what the target writes greedily here and now; `same_as_file` counts the answers that equal
    those of the held-out file. The loop sees the unmodified Hugging Face class, the trainer its own engine.
    """
    corpus = load_corpus(heldout, load_tokenizer(str(target)), max_document=tokens + 2).documents[:documents]
    written = [d.ids[prompt : int(d.loss_mask.nonzero().max()) + 1].tolist() for d in corpus]
    prompts = [d.ids[:prompt].tolist() for d in corpus]
    limits = [len(answer) for answer in written]

    model = load(target, device)
    embed = model.get_input_embeddings().weight
    drafter = greedy_loop.ServedDrafter.load(export, embed, model.get_output_embeddings().weight)
    forward = greedy_loop.causal_lm(model, drafter.layer_ids)
    length = -(-(tokens + drafter.block_size) // 64) * 64
    began = time.monotonic()
    greedy = greedy_loop.greedy(forward, prompts, limits, END, length)
    say(f"  greedy text of {len(greedy)} prompts: {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    committed = greedy_loop.speculate(forward, drafter, prompts, limits, END, length)
    say(f"  speculative decoding of the same: {time.monotonic() - began:.1f} s")
    del model, forward

    texts = [
        Document(torch.tensor(p + g), torch.arange(len(p) + len(g)) >= len(p), d.key)
        for d, p, g in zip(corpus, prompts, greedy, strict=True)
    ]
    found = _evaluate(target, export, texts, device)
    loop = greedy_loop.tau(committed)
    result = {
        "documents": len(greedy),
        "tokens": sum(map(len, greedy)),
        "same_as_file": sum(g == w for g, w in zip(greedy, written, strict=True)),
        "committed_equals_greedy": sum(c.ids == g for c, g in zip(committed, greedy, strict=True)),
        "tau_loop": loop,
        "cycles_loop": sum(answer.cycles for answer in committed),
        "tau_trainer": found.tau,
        "cycles_trainer": found.cycles,
        "difference": found.tau - loop,
        "per_position": found.per_position,
    }
    result["holds"] = (
        abs(result["difference"]) <= TOLERANCE and result["committed_equals_greedy"] == result["documents"]
    )
    return result


def _evaluate(
    target: Path, export: Path, texts: list[Document], device: torch.device
) -> acceptance.Acceptance:
    """The trainer's own evaluation, with the exported weights and the target as the trainer runs it."""
    drafter = load_export(export)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    longest = max(len(text.ids) for text in texts)
    engine, head = load_target(str(target), drafter.geometry, device, dtype, longest)
    return acceptance.evaluate(
        drafter.to(device), head, texts, engine.features_alone, device=device, dtype=dtype
    )
