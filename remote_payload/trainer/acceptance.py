"""How many tokens a served drafter would commit per cycle, known in training for the price of a feature pass.

Greedy speculative decoding commits, from anchor a, the drafted prefix that the target agrees with and one
more token of the target's own, and goes on at a + accepted + 1. On text that the target itself wrote
greedily, to agree is to equal that text, so the walk needs no target, no cache and no rollback (which
recurrent layers do not offer): features of the whole document once, drafts from every possible anchor in
batches, then arithmetic.

Convention (paper and z-lab's code): tau counts the target's own token, so it lies between 1 and the block
size; it is averaged per response, then over responses. A last cycle commits only what is left of its
response.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.anchors import Blocks
from trainer.data import Document
from trainer.drafter import Drafter, block_inputs
from trainer.masks import FLEX_BLOCK, build_masks
from trainer.target import SharedHead

QUERIES = 512  # block slots per drafter forward; their logits take 254 MB in bf16 for V = 248,320


@dataclass(frozen=True)
class Acceptance:
    """tau: mean over responses of tokens per cycle; pooled: all tokens over all cycles.

    per_position[k-1]: share of the cycles whose slot k lay inside the response in which slot k was accepted.
    All rates are NaN when no response has two tokens.
    """

    tau: float
    pooled: float
    cycles: int
    per_position: tuple[float, ...]
    responses: int
    documents: int


def spans(loss_mask: Tensor) -> list[tuple[int, int]]:
    """(first, last) index of every response with at least two tokens; the first token comes from prefill."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist()
    return [(start, end - 1) for start, end in zip(starts, ends, strict=True) if end - start > 1]


def walk(ids: Tensor, drafts: Tensor, first: int, last: int) -> list[tuple[int, int]]:
    """(accepted, committed) of each cycle of one response.

    ids int64 [n]; drafts int64 [last - first, B-1]: row i holds what was drafted from anchor first + i.
    """
    cycles = []
    anchor = first
    while anchor < last:
        truth = ids[anchor + 1 : last + 1][: drafts.shape[1]]
        agrees = drafts[anchor - first, : len(truth)] == truth
        accepted = int(agrees.int().cumprod(0).sum())
        committed = min(accepted + 1, last - anchor)
        cycles.append((accepted, committed))
        anchor += committed
    return cycles


def _drafts(
    drafter: Drafter, head: SharedHead, document: Document, features: Tensor, anchors: list[int], length: int
) -> Tensor:
    """int64 [len(anchors), B-1] on the CPU: the greedy choice of every draft slot.

    The context is padded to `length` and the anchors to full batches: one shape for a whole evaluation."""
    g, device = drafter.geometry, features.device
    step = FLEX_BLOCK // math.gcd(FLEX_BLOCK, g.block_size)
    count = max(step, QUERIES // g.block_size // step * step)
    ids = torch.zeros(length, dtype=torch.int64, device=device)
    ids[: len(document.ids)] = document.ids.to(device)
    positions = torch.arange(length, device=device)
    context = drafter.context(torch.nn.functional.pad(features, (0, 0, 0, length - len(features))))
    found = []
    for start in range(0, len(anchors), count):
        part = anchors[start : start + count]
        padded = torch.tensor(part + part[-1:] * (count - len(part)), device=device)
        blocks = Blocks(padded, torch.arange(count, device=device) < len(part))
        tokens, slots = block_inputs(ids, positions, padded, g)
        masks = build_masks(blocks, positions, g.block_size, g.layer_types, g.sliding_window, heads=g.heads)
        hidden = drafter(context, head.embed(tokens), positions, slots, masks).unflatten(0, (count, -1))
        found.append((hidden[: len(part), 1:] @ head.lm_head.T).argmax(-1).cpu())
    return torch.cat(found)


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    head: SharedHead,
    documents: list[Document],
    features_fn: Callable[[Tensor], Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Acceptance:
    """Walk every response of `documents`, which must be the target's own greedy text.

    features_fn: ids int64 [n] -> features [n, K*H] of that document alone, on any device; `device` and
    `dtype` are the drafter's. Its islands must accept shapes other than a training step's.
    """
    size = drafter.geometry.block_size
    longest = max((len(document.ids) for document in documents), default=0)
    length = -(-longest // FLEX_BLOCK) * FLEX_BLOCK
    taus: list[float] = []
    cycles: list[tuple[int, int]] = []
    reached, accepted = torch.zeros(size - 1), torch.zeros(size - 1)
    for document in documents:
        turns = spans(document.loss_mask)
        if not turns:
            continue
        features = features_fn(document.ids).to(device, dtype)
        anchors = [anchor for first, last in turns for anchor in range(first, last)]
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            drafts = _drafts(drafter, head, document, features, anchors, length)
        for first, last in turns:
            mine, drafts = drafts[: last - first], drafts[last - first :]
            visited = walk(document.ids, mine, first, last)
            taus.append((last - first) / len(visited))
            at = first
            for taken, committed in visited:
                reached[: last - at] += 1
                accepted[:taken] += 1
                at += committed
            cycles += visited
    return Acceptance(
        tau=sum(taus) / len(taus) if taus else math.nan,
        pooled=sum(committed for _, committed in cycles) / len(cycles) if cycles else math.nan,
        cycles=len(cycles),
        per_position=tuple((accepted / reached).tolist()),
        responses=len(taus),
        documents=len(documents),
    )
