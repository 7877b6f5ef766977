"""The chunked loss against the plain one that holds all logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from trainer.anchors import draw_anchors
from trainer.data import Document, pack
from trainer.loss import block_loss


@pytest.mark.parametrize("chunk_blocks", [1, 5, 16, 100])
def test_value_gradient_and_counts_equal_the_naive_loss(chunk_blocks):
    size, vocab, width, gamma = 6, 50, 8, 4.0
    draw = torch.Generator().manual_seed(0)
    documents = [
        Document(torch.randint(0, vocab, (n,), generator=draw), torch.rand(n, generator=draw) < 0.7, "")
        for n in (40, 25)
    ]
    row = pack(documents, 80)
    blocks = draw_anchors(row, 40, draw)
    assert 0 < int(blocks.valid.sum()) < 40  # padded blocks take part in the test
    head = torch.randn(vocab, width, generator=draw)
    hidden = torch.randn(40 * size, width, generator=draw, requires_grad=True)

    parts = block_loss(hidden, row, blocks, head, block_size=size, gamma=gamma, chunk_blocks=chunk_blocks)
    (gradient,) = torch.autograd.grad(parts.numerator * 0.5, hidden)

    numerator, denominator = torch.zeros(()), 0.0
    correct, counted = [0] * (size - 1), [0] * (size - 1)
    for block in range(40):
        if not blocks.valid[block]:
            continue
        for slot in range(1, size):
            token = int(blocks.anchors[block]) + slot
            if token >= len(row.ids) or row.doc_ids[token] != row.doc_ids[blocks.anchors[block]]:
                break
            if not row.loss_mask[token]:  # the answer has ended: what comes after it is nothing to draft
                break
            logits = hidden[block * size + slot] @ head.T
            weight = math.exp(-(slot - 1) / gamma)
            numerator = numerator + weight * F.cross_entropy(logits[None], row.ids[token][None])
            denominator += weight
            correct[slot - 1] += int(logits.argmax() == row.ids[token])
            counted[slot - 1] += 1
    (wanted,) = torch.autograd.grad(numerator * 0.5, hidden)

    assert torch.allclose(parts.numerator, numerator, rtol=1e-5)
    assert float(parts.denominator) == pytest.approx(denominator, rel=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-5)
    assert parts.correct.tolist() == correct
    assert parts.counted.tolist() == counted


def test_the_anchor_itself_is_never_a_label():
    row = pack([Document(torch.arange(8), torch.ones(8, dtype=torch.bool), "")], 8)
    blocks = draw_anchors(row, 2, torch.Generator())
    hidden = torch.randn(8, 3, requires_grad=True)
    block_loss(
        hidden, row, blocks, torch.randn(9, 3), block_size=4, gamma=4.0, chunk_blocks=2
    ).numerator.backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad[0::4], torch.zeros(2, 3))
    assert (hidden.grad.view(2, 4, 3)[:, 1:].abs().sum(-1) > 0).all()
