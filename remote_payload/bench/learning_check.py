"""Is the trainer's tau that of real speculative decoding? One export, two programs, one text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench import greedy_loop
from bench.common import say
from bench.learning_target import load
from bench.learning_text import END
from trainer import acceptance
from trainer.data import Document, load_corpus, load_tokenizer
from trainer.export import load_export
from trainer.target_loading import load_target

TOLERANCE = 0.02  # between the two values of tau


def heldout_documents(target: Path, file: Path, tokens: int) -> list[Document]:
    """Prompt and the target's own answer of each held-out conversation, without what a template adds."""
    corpus = load_corpus(file, load_tokenizer(str(target)), max_document=tokens + 2)
    ends = [int(d.loss_mask.nonzero().max()) + 1 for d in corpus.documents]
    return [Document(d.ids[:n], d.loss_mask[:n], d.key) for d, n in zip(corpus.documents, ends, strict=True)]


def check(
    target: Path, export: Path, documents: list[Document], *, tokens: int, device: torch.device
) -> dict[str, Any]:
    """Both values of tau on the held-out prompts, and whether every text agrees.

    The text is what the target writes greedily here and now; `same_as_file` counts the answers that equal
    those of the held-out file. The loop sees the unmodified Hugging Face class, the trainer its own engine.
    """
    prompts = [d.ids[~d.loss_mask].tolist() for d in documents]
    written = [d.ids[d.loss_mask].tolist() for d in documents]
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

    texts = [
        Document(torch.tensor(p + g), torch.arange(len(p) + len(g)) >= len(p), d.key)
        for d, p, g in zip(documents, prompts, greedy, strict=True)
    ]
    found = judge(target, {"it": export}, texts, device)["it"]
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
    say(
        f"  tau: trainer {found.tau:.4f} ({found.cycles:,} cycles), greedy loop {loop:.4f} "
        f"({result['cycles_loop']:,} cycles), difference {result['difference']:+.4f}; committed text equals "
        f"greedy text in {result['committed_equals_greedy']} of {result['documents']}"
    )
    return result


def judge(
    target: Path,
    exports: dict[str, Path],
    texts: list[Document],
    device: torch.device,
    precision: str | None = None,
) -> dict[str, acceptance.Acceptance]:
    """The trainer's own evaluation of each exported drafter, the target run as the trainer runs it."""
    drafters = {name: load_export(export) for name, export in exports.items()}
    geometry = next(iter(drafters.values())).geometry
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    longest = max(len(text.ids) for text in texts)
    engine, head = load_target(str(target), geometry, device, dtype, longest, precision=precision)
    return {
        name: acceptance.evaluate(
            drafter.to(device), head, texts, engine.features_alone, device=device, dtype=dtype
        )
        for name, drafter in drafters.items()
    }
