"""Blocks start where serving would, in every document of a row, and learn from their own answer alone."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.anchors import Blocks, allowed_anchors, draw_anchors, labels, share_out
from trainer.data import Document, pack


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def document(*turns: int) -> Document:
    """Turns of these lengths, a question and an answer in turn."""
    mask = torch.cat([torch.full((n,), i % 2 == 1) for i, n in enumerate(turns)])
    return Document(torch.arange(len(mask)), mask, "")


rows = st.lists(st.lists(st.integers(1, 25), min_size=2, max_size=5), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    turns=rows,
    padding=st.integers(0, 9),
    count=st.integers(1, 60),
    cap=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 999),
)
def test_blocks_start_at_distinct_supervised_tokens_in_every_document(turns, padding, count, cap, seed):
    documents = [document(*lengths) for lengths in turns]
    row = pack(documents, sum(len(d.ids) for d in documents) + padding)
    blocks = draw_anchors(row, count, generator(seed), cap)
    allowed = allowed_anchors(row)

    assert blocks.anchors.shape == blocks.valid.shape == (count,)
    assert torch.equal(blocks.anchors, blocks.anchors.sort().values)
    chosen = blocks.anchors[blocks.valid]
    assert allowed[chosen].all()
    assert len(set(chosen.tolist())) == len(chosen)
    sizes = [int(allowed[row.doc_ids == d].sum()) for d in range(len(documents))]
    drawn = [int((row.doc_ids[chosen] == d).sum()) for d in range(len(documents))]
    room = [min(n, cap or n) for n in sizes]
    assert sum(drawn) == min(count, sum(room))
    assert all(n <= most for n, most in zip(drawn, room, strict=True))
    if count >= len(documents):
        assert all(n >= min(most, 1) for n, most in zip(drawn, room, strict=True))
    for d, n in enumerate(drawn):  # the first token of each answer is there, as far as the share goes
        of_it = allowed & (row.doc_ids == d)
        starts = [a for a in of_it.nonzero().flatten().tolist() if a == 0 or not row.loss_mask[a - 1]]
        assert len(set(starts) & set(chosen.tolist())) == min(n, len(starts))


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    count=st.integers(1, 600),
    cap=st.sampled_from([None, 3, 50]),
)
def test_slots_are_shared_out_in_proportion(sizes, count, cap):
    quotas = share_out(sizes, count, cap, generator(0))
    room = [min(size, cap or size) for size in sizes]
    total = min(count, sum(room))
    assert sum(quotas) == total
    if total >= len(sizes):
        ones = sum(total * size < sum(room) for size in room)  # documents lifted to one take from the others
        for quota, size in zip(quotas, room, strict=True):
            share = total * size / sum(room)
            assert 1 <= quota <= size
            assert math.floor(share) - ones <= quota <= max(math.ceil(share), 1)


def test_the_first_token_of_an_answer_is_allowed_and_its_header_and_end_token_are_not():
    row = pack([document(3, 4, 2, 3), document(2, 2)], 18)
    assert allowed_anchors(row).nonzero().flatten().tolist() == [3, 4, 5, 9, 10, 14]


def test_anchors_are_drawn_anew_and_are_a_function_of_the_generator_alone():
    row = pack([document(1, 199)], 256)
    first, again, other = (draw_anchors(row, 32, generator(seed)).anchors for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_row_without_an_answer_gives_no_valid_block():
    blocks = draw_anchors(pack([document(5, 1)], 8), 3, generator(0))
    assert blocks.anchors.tolist() == [7, 7, 7]
    assert not blocks.valid.any()


def test_labels_end_with_the_answer_the_document_and_the_row():
    row = pack([document(2, 3, 1, 4), document(1, 3)], 14)  # supervised: 2-4, 6-9, 11-13
    blocks = Blocks(torch.tensor([3, 8, 12, 13]), torch.tensor([True, True, True, False]))
    ids, counts = labels(row, blocks, 4)
    assert counts.tolist() == [
        [True, False, False],  # 5 is a question's; 6 is the next answer's, and no label of this block
        [True, False, False],  # 10 is another document's
        [True, False, False],  # the row ends
        [False, False, False],  # padding
    ]
    assert ids[0, 0] == row.ids[4] and ids[1, 0] == row.ids[9]


def test_short_documents_are_not_starved():
    row = pack([document(1, 30), document(4, 60)], 100)
    drawn = draw_anchors(row, 30, generator(3))
    assert int((row.doc_ids[drawn.anchors[drawn.valid]] == 0).sum()) == 10  # 29 and 59 allowed: 9.9 and 20.1
