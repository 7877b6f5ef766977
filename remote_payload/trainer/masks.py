"""Which keys a block slot may see, stated once, so that flex on CUDA and dense on CPU cannot disagree.

The keys of a row are its S context tokens followed by all A*B block slots. A slot k of the block anchored at
a sees
- context of the same document strictly before a: the anchor's own feature does not exist yet when serving
drafts;
- a full layer: every slot of its own block, both directions;
- a sliding layer (window W): context from a+k-(W-1) on, and slots up to k of its own block, as served.
Nothing else. Both parts are runs of consecutive keys, so the whole rule is two half-open ranges for each
query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainer.anchors import Blocks
from trainer.errors import Refusal

# Dense attention materialises the scores of every head in fp32; beyond this a row is too big for it.
DENSE_LIMIT_BYTES = 2 << 30
FLEX_BLOCK = 128


class KeyRanges(NamedTuple):
    """For each of the Q = A*B queries: context keys [context_from, context_to), own keys [own_from, own_to).
    int32 [Q]."""

    context_from: torch.Tensor
    context_to: torch.Tensor
    own_from: torch.Tensor
    own_to: torch.Tensor


@dataclass(frozen=True)
class DenseMask:
    """visible bool [Q, S+Q] for scaled_dot_product_attention."""

    visible: torch.Tensor


@dataclass(frozen=True)
class FlexMask:
    """A torch BlockMask for compiled flex_attention."""

    blocks: Any


Mask = DenseMask | FlexMask


def key_ranges(
    blocks: Blocks, positions: torch.Tensor, block_size: int, layer_type: str, window: int | None
) -> KeyRanges:
    """The rule. `positions` int64 [S] restart at each document, so an anchor's document starts at a -
    positions[a]."""
    context = len(positions)
    slot = torch.arange(block_size, device=positions.device)
    anchor = blocks.anchors[:, None].expand(-1, block_size)
    context_from = anchor - positions[anchor]
    context_to = torch.where(blocks.valid[:, None], anchor, context_from)
    own_from = context + block_size * torch.arange(len(blocks.anchors), device=positions.device)[:, None]
    own_from = own_from.expand(-1, block_size)
    if layer_type == "sliding_attention":
        assert window is not None
        context_from = torch.maximum(context_from, anchor + slot - (window - 1))
        own_to = own_from + slot + 1
    else:
        own_to = own_from + block_size
    return KeyRanges(*(r.reshape(-1).to(torch.int32) for r in (context_from, context_to, own_from, own_to)))


def visible(ranges: KeyRanges, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The rule as a predicate over index tensors of any shape: serves flex's mask_mod and the dense mask
    alike."""
    in_context = (key >= ranges.context_from[query]) & (key < ranges.context_to[query])
    in_block = (key >= ranges.own_from[query]) & (key < ranges.own_to[query])
    return in_context | in_block


def build_masks(
    blocks: Blocks,
    positions: torch.Tensor,
    block_size: int,
    layer_types: tuple[str, ...],
    window: int | None,
    *,
    heads: int,
    backend: str | None = None,
) -> dict[str, Mask]:
    """One mask per distinct layer type. `backend` None: flex on CUDA, dense on CPU. Dense on CUDA only when
    asked for by name, for few queries on eager islands as an evaluation has: a step never falls back."""
    backend = backend or ("flex" if positions.is_cuda else "dense")
    make = {"flex": lambda r, s: flex_mask(r, s), "dense": lambda r, s: dense_mask(r, s, heads)}[backend]
    return {
        kind: make(key_ranges(blocks, positions, block_size, kind, window), len(positions))
        for kind in dict.fromkeys(layer_types)
    }


def dense_mask(ranges: KeyRanges, context: int, heads: int) -> DenseMask:
    queries = len(ranges.own_from)
    wanted = 4 * heads * queries * (context + queries)
    if wanted > DENSE_LIMIT_BYTES:
        raise Refusal(
            f"dense attention would take {wanted:,} bytes a layer, the limit is {DENSE_LIMIT_BYTES:,}: "
            "lower data.budget or train.anchors, or train on a GPU"
        )
    device = ranges.own_from.device
    query = torch.arange(queries, device=device)[:, None]
    return DenseMask(visible(ranges, query, torch.arange(context + queries, device=device)))


def check_tiles(context: int, queries: int) -> None:
    """Refuses sizes of a row that flex attention cannot tile."""
    if context % FLEX_BLOCK or queries % FLEX_BLOCK:
        raise Refusal(
            f"flex attention works on multiples of {FLEX_BLOCK}: data.budget is {context}, "
            f"train.anchors x drafter.block_size is {queries}: round both up"
        )


def flex_mask(ranges: KeyRanges, context: int) -> FlexMask:
    """A BlockMask from the ranges by arithmetic.

    `create_block_mask` would evaluate every (query, key) pair of the row, and on torch >= 2.13 its annotation
    corrupts graphs that other threads compile at that moment; this does neither.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries = len(ranges.own_from)
    keys = context + queries
    check_tiles(context, queries)
    start = torch.arange(0, keys, FLEX_BLOCK, device=ranges.own_from.device)
    end = start + FLEX_BLOCK

    def touched(
        low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:  # [Q, key blocks]; an empty range touches none
        return (low[:, None] < end) & (high[:, None] > start) & (low < high)[:, None]

    def covered(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return (low[:, None] <= start) & (high[:, None] >= end)

    # 27B row: 8,192 queries x 448 key blocks are 3.7 MB of booleans each, microseconds on a GPU. Whole tiles
    # could be judged by their first and last query only where all queries of a tile share a document.
    context_range, own_range = ranges[:2], ranges[2:]
    groups = (queries // FLEX_BLOCK, FLEX_BLOCK, len(start))
    some = (touched(*context_range) | touched(*own_range)).view(groups).any(1)
    full = (covered(*context_range) | covered(*own_range)).view(groups).all(1)
    partial = some & ~full
    partial_count, partial_index = _ordered(partial)
    full_count, full_index = _ordered(full)
    # The same lists by key block, for the backward pass. BlockMask.from_kv_blocks would derive them from the
    # first ones through a dense mask that is already at hand.
    partial_q_count, partial_q_index = _ordered(partial.T)
    full_q_count, full_q_index = _ordered(full.T)
    return FlexMask(
        BlockMask(
            seq_lengths=(queries, keys),
            kv_num_blocks=partial_count,
            kv_indices=partial_index,
            full_kv_num_blocks=full_count,
            full_kv_indices=full_index,
            q_num_blocks=partial_q_count,
            q_indices=partial_q_index,
            full_q_num_blocks=full_q_count,
            full_q_indices=full_q_index,
            BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK),
            mask_mod=lambda b, h, q, k: visible(ranges, q, k),
        )
    )


def _ordered(occupied: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [query blocks, key blocks] -> flex's (count [1, 1, n], indices [1, 1, n, m]), wanted blocks
    first."""
    indices = occupied.int().argsort(dim=-1, descending=True, stable=True)
    return occupied.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None].contiguous()
