"""Blocks start where serving would start one, and stay inside one document."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.anchors import allowed_anchors, draw_anchors
from trainer.data import Document, pack


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    size=st.integers(2, 10),
    count=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_blocks_never_leave_their_document(lengths, size, count, seed):
    draw = torch.Generator().manual_seed(seed)
    documents = [Document(torch.arange(n), torch.rand(n, generator=draw) < 0.6, "") for n in lengths]
    row = pack(documents, sum(lengths) + seed % 7)
    blocks = draw_anchors(row, count, size, draw)

    assert blocks.anchors.shape == blocks.valid.shape == (count,)
    assert torch.equal(blocks.anchors, blocks.anchors.sort().values)
    chosen = blocks.anchors[blocks.valid].tolist()
    assert len(set(chosen)) == len(chosen) == min(count, int(allowed_anchors(row, size).sum()))
    for anchor in chosen:
        assert row.doc_ids[anchor : anchor + size].unique().numel() == 1
        assert row.doc_ids[anchor] >= 0
        assert anchor + size <= len(row.ids)
        assert row.loss_mask[anchor]
        assert row.loss_mask[anchor + 1]


def test_the_first_token_of_an_answer_is_allowed_and_its_header_and_end_token_are_not():
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
    row = pack([Document(torch.arange(12), mask, "")], 12)
    assert allowed_anchors(row, 4).nonzero().flatten().tolist() == [3, 4, 5]


def test_anchors_are_drawn_anew_and_are_a_function_of_the_generator_alone():
    row = pack([Document(torch.arange(200), torch.ones(200, dtype=torch.bool), "")], 256)
    first, again, other = (
        draw_anchors(row, 32, 8, torch.Generator().manual_seed(seed)).anchors for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
