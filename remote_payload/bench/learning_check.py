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
PROOF_TOKENS = 8192  # of the row that kernels are proven on: documents come alone here


def heldout_documents(target: Path, file: Path, tokens: int) -> list[Document]:
    """Prompt and the target's own answer of each held-out conversation, without what a template adds."""
    corpus = load_corpus(file, load_tokenizer(str(target)), max_document=tokens + 2)
    ends = [int(d.loss_mask.nonzero().max()) + 1 for d in corpus.documents]
    return [Document(d.ids[:n], d.loss_mask[:n], d.key) for d, n in zip(corpus.documents, ends, strict=True)]


def check(
    target: Path,
    exports: dict[str, Path],
    documents: list[Document],
    *,
    tokens: int,
    in_curve: int,
    device: torch.device,
) -> dict[str, Any]:
    """Both values of tau of the `bf16` export on the held-out prompts, and whether every text agrees.

    The text is what the target writes greedily here and now; `same_as_file` counts the answers that equal
    those of the held-out file. The loop sees the unmodified Hugging Face class, the trainer its own engine.
    `tau_by_features` judges every export on bf16 features and, if there is an `fp8` one, on those as well.
    `in_curve`: how many documents the run itself evaluated, for a point that its curve compares with.
    """
    prompts = [d.ids[~d.loss_mask].tolist() for d in documents]
    written = [d.ids[d.loss_mask].tolist() for d in documents]
    greedy, committed = _decode(target, exports["bf16"], prompts, list(map(len, written)), tokens, device)
    texts = [
        Document(torch.tensor(p + g), torch.arange(len(p) + len(g)) >= len(p), d.key)
        for d, p, g in zip(documents, prompts, greedy, strict=True)
    ]
    judged = {
        precision: judge(target, exports, texts, device, None if precision == "bf16" else precision)
        for precision in exports
    }
    found, loop = judged["bf16"]["bf16"], greedy_loop.tau(committed)
    equal = sum(c.ids == g for c, g in zip(committed, greedy, strict=True))
    result = {
        "holds": abs(found.tau - loop) <= TOLERANCE and equal == len(greedy),
        "documents": len(greedy),
        "tokens": sum(map(len, greedy)),
        "same_as_file": sum(g == w for g, w in zip(greedy, written, strict=True)),
        "committed_equals_greedy": equal,
        "tau_loop": loop,
        "tau_loop_in_curve": greedy_loop.tau(committed[:in_curve]),
        "cycles_loop": sum(answer.cycles for answer in committed),
        "tau_trainer": found.tau,
        "cycles_trainer": found.cycles,
        "difference": found.tau - loop,
        "per_position": found.per_position,
        "tau_by_features": {
            precision: {name: acceptance.tau for name, acceptance in by_training.items()}
            for precision, by_training in judged.items()
        },
    }
    say(
        f"  tau: trainer {found.tau:.4f} ({found.cycles:,} cycles), greedy loop {loop:.4f} "
        f"({result['cycles_loop']:,} cycles), difference {found.tau - loop:+.4f}; committed text equals "
        f"greedy text in {equal} of {len(greedy)}"
    )
    for precision, taus in result["tau_by_features"].items():
        say(f"  tau on {precision} features, by the features of the training: {taus}")
    return result


def _decode(
    target: Path,
    export: Path,
    prompts: list[list[int]],
    limits: list[int],
    tokens: int,
    device: torch.device,
) -> tuple[list[list[int]], list[greedy_loop.Answer]]:
    """Greedy and speculative answers by bench/greedy_loop.py."""
    model = load(target, device)
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    drafter = greedy_loop.ServedDrafter.load(export, embed, head)
    forward = greedy_loop.causal_lm(model, drafter.layer_ids)
    length = -(-(tokens + drafter.block_size) // 64) * 64
    began = time.monotonic()
    greedy = greedy_loop.greedy(forward, prompts, limits, END, length)
    say(f"  greedy text of {len(greedy)} prompts: {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    committed = greedy_loop.speculate(forward, drafter, prompts, limits, END, length)
    say(f"  speculative decoding of the same: {time.monotonic() - began:.1f} s")
    return greedy, committed


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
    engine, head = load_target(
        str(target), geometry, device, dtype, longest, tokens=PROOF_TOKENS, precision=precision
    )
    return {
        name: acceptance.evaluate(
            drafter.to(device), head, texts, engine.features_alone, device=device, dtype=dtype
        )
        for name, drafter in drafters.items()
    }
