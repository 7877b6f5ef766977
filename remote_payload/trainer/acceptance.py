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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.anchors import Blocks
from trainer.data import Document
from trainer.drafter import Drafter, block_inputs
from trainer.islands import EAGER
from trainer.masks import build_masks
from trainer.target import SharedHead

QUERIES = 512  # block slots per drafter forward; logits of one slot each: 32 x V of them for B = 16


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


def walk(agreeing: list[int], response: int) -> list[tuple[int, int]]:
    """(accepted, committed) of each cycle of one response of `response` tokens.

    agreeing [response - 1]: how many drafted tokens agree at each possible anchor, none beyond the response.
    """
    cycles = []
    anchor = 0
    while anchor < response - 1:
        committed = min(agreeing[anchor] + 1, response - 1 - anchor)
        cycles.append((agreeing[anchor], committed))
        anchor += committed
    return cycles


def _agreeing(hidden: Tensor, truth: Tensor, lm_head: Tensor) -> list[int]:
    """Length of the agreeing prefix of each block; hidden [n, B-1, H], truth int64 [n, B-1], -1 past the end.

    Slot k meets the head only where slots 1 to k-1 agreed, which leaves about tau of the B-1 products."""
    lengths = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    alive = torch.arange(len(hidden), device=hidden.device)
    for slot in range(hidden.shape[1]):
        alive = alive[truth[alive, slot] >= 0]
        alive = alive[(hidden[alive, slot] @ lm_head.T).argmax(-1) == truth[alive, slot]]
        lengths[alive] += 1
    return lengths.tolist()


def _draft(
    drafter: Drafter, head: SharedHead, document: Document, features: Tensor, responses: list[tuple[int, int]]
) -> list[int]:
    """How many drafted tokens agree at each possible anchor of the document's responses, in order."""
    g, device = drafter.geometry, features.device
    batch = max(1, QUERIES // g.block_size)
    ids = document.ids.to(device)
    positions = torch.arange(len(ids), device=device)
    context = drafter.context(features, positions)
    anchors = torch.cat([torch.arange(first, last) for first, last in responses]).to(device)
    ends = torch.cat([torch.full((last - first,), last) for first, last in responses]).to(device)
    found: list[int] = []
    for part, end in zip(anchors.split(batch), ends.split(batch), strict=True):
        blocks = Blocks(part, torch.ones_like(part, dtype=torch.bool))
        tokens, slots = block_inputs(ids, positions, part, g)
        # Dense on purpose, on CUDA too: QUERIES rows of one document, not a training row's thousands.
        masks = build_masks(
            blocks, positions, g.block_size, g.layer_types, g.sliding_window, heads=g.heads, backend="dense"
        )
        hidden = drafter(context, head.embed(tokens), slots, masks)
        at = part[:, None] + torch.arange(1, g.block_size, device=device)
        truth = torch.where(at <= end[:, None], ids[at.clamp(max=len(ids) - 1)], -1)
        found += _agreeing(hidden.unflatten(0, (-1, g.block_size))[:, 1:], truth, head.lm_head)
    return found


@contextmanager
def _eager(drafter: Drafter) -> Iterator[None]:
    """Documents have any length: nothing may compile for them."""
    trained_with, drafter.islands = drafter.islands, EAGER
    try:
        yield
    finally:
        drafter.islands = trained_with


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
    `dtype` are the drafter's. Runs eagerly, whatever islands the drafter trains with.
    """
    slots = drafter.geometry.block_size - 1
    taus: list[float] = []
    cycles: list[tuple[int, int]] = []
    reached, accepted = [0] * slots, [0] * slots
    for document in documents:
        responses = spans(document.loss_mask)
        if not responses:
            continue
        features = features_fn(document.ids).to(device, dtype)
        with _eager(drafter):
            agreeing = _draft(drafter, head, document, features, responses)
        for first, last in responses:
            mine, agreeing = agreeing[: last - first], agreeing[last - first :]
            visited = walk(mine, last - first + 1)
            cycles += visited
            taus.append((last - first) / len(visited))
            left = last - first
            for taken, committed in visited:
                for slot in range(min(left, slots)):
                    reached[slot] += 1
                    accepted[slot] += slot < taken
                left -= committed
    return Acceptance(
        tau=sum(taus) / len(taus) if taus else math.nan,
        pooled=sum(committed for _, committed in cycles) / len(cycles) if cycles else math.nan,
        cycles=len(cycles),
        per_position=tuple(a / r if r else math.nan for a, r in zip(accepted, reached, strict=True)),
        responses=len(taus),
        documents=len(documents),
    )
