"""Both mask backends against the paper's rule, written again as nested loops over (query, key)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainer import masks
from trainer.anchors import Blocks, draw_anchors
from trainer.data import Document, pack
from trainer.errors import Refusal

LAYERS = ("full_attention", "sliding_attention")
WINDOW = 6


def some_row(seed: int, budget: int, lengths: tuple[int, ...]):
    draw = torch.Generator().manual_seed(seed)
    documents = [
        Document(torch.arange(n), torch.rand(n, generator=draw) < 0.7, str(i)) for i, n in enumerate(lengths)
    ]
    return pack(documents, budget)


def brute_force(row, blocks: Blocks, size: int, sliding: bool) -> torch.Tensor:
    context, queries = len(row.ids), len(blocks.anchors) * size
    visible = torch.zeros(queries, context + queries, dtype=torch.bool)
    for query in range(queries):
        block, slot = divmod(query, size)
        anchor = int(blocks.anchors[block])
        for key in range(context):
            before = (
                key < anchor and bool(row.doc_ids[key] == row.doc_ids[anchor]) and bool(blocks.valid[block])
            )
            in_window = key >= anchor + slot - (WINDOW - 1)
            visible[query, key] = before and (in_window or not sliding)
        for other in range(queries):
            other_block, other_slot = divmod(other, size)
            visible[query, context + other] = other_block == block and (other_slot <= slot or not sliding)
    return visible


@pytest.mark.parametrize(
    ("seed", "size", "count", "budget", "lengths"),
    [
        (0, 4, 32, 128, (30, 50, 20)),
        (1, 8, 16, 128, (128,)),
        (2, 8, 32, 256, (9, 8, 100, 7, 60)),  # a document without room for a block; many padded blocks
        (3, 16, 16, 256, (200, 40)),  # a window smaller than the block
    ],
)
@pytest.mark.parametrize("layer", LAYERS)
def test_both_backends_follow_the_papers_rule(seed, size, count, budget, lengths, layer):
    row = some_row(seed, budget, lengths)
    blocks = draw_anchors(row, count, torch.Generator().manual_seed(seed))
    truth = brute_force(row, blocks, size, sliding=layer == "sliding_attention")

    built = {
        backend: masks.build_masks(blocks, row.positions, size, LAYERS, WINDOW, heads=2, backend=backend)[
            layer
        ]
        for backend in ("dense", "flex")
    }
    assert torch.equal(built["dense"].visible, truth)

    flex = built["flex"].blocks
    query, key = torch.arange(truth.shape[0])[:, None], torch.arange(truth.shape[1])
    assert torch.equal(flex.mask_mod(0, 0, query, key), truth)
    tiles = truth.unflatten(0, (-1, masks.FLEX_BLOCK)).unflatten(2, (-1, masks.FLEX_BLOCK)).transpose(1, 2)
    listed = torch.zeros(tiles.shape[:2], dtype=torch.bool)
    for i in range(listed.shape[0]):
        partial = flex.kv_indices[0, 0, i, : flex.kv_num_blocks[0, 0, i]]
        full = flex.full_kv_indices[0, 0, i, : flex.full_kv_num_blocks[0, 0, i]]
        assert not set(partial.tolist()) & set(full.tolist())
        assert tiles[i, full.long()].all()  # flex never evaluates the rule there
        listed[i, partial.long()] = listed[i, full.long()] = True
    assert torch.equal(listed, tiles.flatten(2).any(-1))  # nothing missed, nothing computed for naught


def listed(count: torch.Tensor, indices: torch.Tensor) -> list[set[int]]:
    return [set(row[:n].tolist()) for n, row in zip(count[0, 0].tolist(), indices[0, 0], strict=True)]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 150), min_size=1, max_size=12),
    tiles=st.integers(1, 3),
    size=st.sampled_from([4, 8, 16, 32]),
    count=st.integers(1, 3),
    layer=st.sampled_from(LAYERS),
    seed=st.integers(0, 999),
)
def test_tiles_for_both_passes_are_those_that_evaluating_every_pair_finds(
    lengths, tiles, size, count, layer, seed
):
    budget, room = 128 * tiles, 128 * tiles
    fitting = [n for n in lengths if (room := room - n) >= 0]
    row = some_row(seed, budget, tuple(fitting))
    blocks = draw_anchors(row, 128 * count // size, torch.Generator().manual_seed(seed))
    made = masks.build_masks(blocks, row.positions, size, (layer,), WINDOW, heads=1, backend="flex")
    mine = made[layer].blocks
    queries, keys = mine.seq_lengths
    theirs = create_block_mask(mine.mask_mod, None, None, queries, keys, device="cpu")
    for count_name, index_name in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        found, wanted = (listed(getattr(m, count_name), getattr(m, index_name)) for m in (mine, theirs))
        assert found == wanted, index_name
    assert mine.kv_indices.dtype == theirs.kv_indices.dtype == torch.int32
    assert mine.kv_indices.shape == theirs.kv_indices.shape  # the same for every row: nothing recompiles


@pytest.mark.slow
def test_compiled_flex_attention_equals_dense_attention_forward():
    row = some_row(5, 256, (100, 90, 40))
    blocks = draw_anchors(row, 32, torch.Generator().manual_seed(5))
    draw = torch.Generator().manual_seed(6)
    query = torch.randn(1, 4, 256, 16, generator=draw)
    key, value = (torch.randn(1, 2, 512, 16, generator=draw) for _ in range(2))
    compiled = torch.compile(flex_attention, dynamic=False)
    for layer in LAYERS:
        dense, flex = (
            masks.build_masks(blocks, row.positions, 8, LAYERS, WINDOW, heads=4, backend=b)[layer]
            for b in ("dense", "flex")
        )
        with torch.no_grad():
            found = compiled(query, key, value, block_mask=flex.blocks, enable_gqa=True)
        wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=dense.visible, enable_gqa=True)
        assert (found - wanted).abs().max() < 1e-5


def test_dense_masks_beyond_the_limit_are_refused_with_the_bytes(monkeypatch):
    monkeypatch.setattr(masks, "DENSE_LIMIT_BYTES", 1000)
    row = some_row(0, 128, (100,))
    blocks = draw_anchors(row, 4, torch.Generator())
    with pytest.raises(Refusal, match=r"would take 18,432 bytes a layer, the limit is 1,000"):
        masks.build_masks(blocks, row.positions, 4, LAYERS, WINDOW, heads=2)


def test_flex_refuses_sizes_that_would_not_tile():
    row = some_row(0, 100, (90,))
    blocks = draw_anchors(row, 32, torch.Generator())
    with pytest.raises(Refusal, match=r"data\.budget is 100"):
        masks.build_masks(blocks, row.positions, 4, LAYERS, WINDOW, heads=2, backend="flex")
