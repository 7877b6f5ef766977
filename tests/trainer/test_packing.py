"""Document borders of a packed row, and operators that must honour them."""

from __future__ import annotations

import pytest
import torch

from trainer import packed_ops
from trainer.data import Document, pack
from trainer.packed_ops import document_attention, document_recurrence
from trainer.packing import CHUNK, Layout, row_lengths
from trainer.target_islands import causal_convolution

CPU = torch.device("cpu")
LENGTHS = (70, 1, 64, 129)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def row(budget: int, *lengths: int):
    return pack(
        [Document(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), "d") for n in lengths],
        budget,
    )


def test_layout_names_every_border():
    layout = Layout.of(LENGTHS, CPU)
    assert layout.cu_seqlens.tolist() == [0, 70, 71, 135, 264]
    assert layout.longest == 129
    assert layout.spans == [(0, 70), (70, 71), (71, 135), (135, 264)]
    assert layout.positions.tolist() == [p for n in LENGTHS for p in range(n)]
    assert layout.seq_idx.tolist() == [[d for d, n in enumerate(LENGTHS) for _ in range(n)]]
    chunks = [[d, c] for d, n in enumerate(LENGTHS) for c in range(-(-n // CHUNK))]
    assert layout.chunk_indices.tolist() == chunks
    assert {t.dtype for t in (layout.cu_seqlens, layout.seq_idx, layout.chunk_indices)} == {torch.int32}


@pytest.mark.parametrize(
    ("budget", "documents", "expected"),
    [
        (100, (60, 40), [60, 40]),
        (100, (60, 30), [60, 30, 10]),
        (100, (30, 15), [30, 15, 30, 25]),  # padding is cut so that none is longer than a document
        (90, (30,), [30, 30, 30]),
    ],
)
def test_padding_is_documents_of_its_own(budget, documents, expected):
    assert row_lengths(row(budget, *documents)) == expected


def seen_alone(operator, tensors, layout):
    return torch.cat(
        [
            operator(*(t[first:last] for t in tensors), Layout.of([last - first], CPU))
            for first, last in layout.spans
        ]
    )


@pytest.mark.parametrize("window", [None, 1, 20, 500])
def test_attention_over_documents_is_masked_attention(window):
    layout = Layout.of(LENGTHS, CPU)
    total = sum(LENGTHS)
    q, k, v = drawn(total, 6, 16), drawn(total, 2, 16), drawn(total, 2, 16)
    found = document_attention(q, k, v, layout, 0.3, window)
    documents, places = layout.seq_idx[0], torch.arange(total)
    apart = places[:, None] - places[None]
    allowed = (documents[:, None] == documents) & (apart >= 0) & (apart < (window or total))
    shared = torch.repeat_interleave(torch.stack([k, v]), 3, dim=2)
    scores = torch.einsum("qhd,khd->hqk", q, shared[0]) * 0.3
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    assert torch.allclose(found, torch.einsum("hqk,khd->qhd", weights, shared[1]), atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "window", "packed"),
    [
        ((1100, 1024, 1500, 1200), None, [1]),  # the last one's slice would leave the row
        ((4900, 60, 40, 1, 120), None, [4]),  # the last four would
        ((2048, 1024), None, []),
        ((900, 900, 900), None, [3]),  # too short for one at a time
        ((1100, 2000), 5000, [1]),
        ((1100, 2000), 64, [2]),
    ],
)
def test_long_documents_by_themselves_see_what_masked_attention_shows_them(
    lengths, window, packed, monkeypatch
):
    """The packed kernel needs a GPU: the reference stands for it, and which documents it got is told."""
    given = []

    def instead(q, k, v, row, scale, window):
        given.append(len(row.lengths))
        assert row.cu_seqlens.diff().tolist() == list(row.lengths) and len(q) == sum(row.lengths)
        return document_attention(q, k, v, row, scale, window)

    monkeypatch.setattr(packed_ops, "varlen_attention", instead)
    layout, total = Layout.of(lengths, CPU), sum(lengths)
    q, k, v = drawn(total, 4, 8), drawn(total, 2, 8), drawn(total, 2, 9)[..., :8]
    found = packed_ops.long_document_attention(q, k, v, layout, 0.3, window)
    assert torch.allclose(found, document_attention(q, k, v, layout, 0.3, window), atol=1e-5)
    assert given == packed


def test_recurrence_starts_anew_at_each_border():
    layout = Layout.of(LENGTHS, CPU)
    total = sum(LENGTHS)
    q, k = (torch.nn.functional.normalize(drawn(total, 2, 8 + i)[..., :8], dim=-1) for i in (0, 1))
    v, g, beta = drawn(total, 4, 8), -drawn(total, 4).abs() / 20, drawn(total, 5)[:, :4].sigmoid()
    found = document_recurrence(q, k, v, g, beta, layout)
    assert torch.allclose(found, delta_rule(q, k, v, g, beta, LENGTHS), atol=1e-5)
    leaking = delta_rule(q, k, v, g, beta, (total,))
    assert (leaking - found)[LENGTHS[0] :].abs().max() > 0.1, "the borders must matter here"


def delta_rule(q, k, v, g, beta, lengths):
    """Token by token: S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = S^T q / sqrt(D)."""
    share = v.shape[1] // k.shape[1]
    q, k = (t.repeat_interleave(share, dim=1) for t in (q, k))
    outputs, token = [], 0
    for length in lengths:
        state = torch.zeros(v.shape[1], k.shape[2], v.shape[2])
        for _ in range(length):
            state = state * g[token].exp()[:, None, None]
            held = torch.einsum("hkv,hk->hv", state, k[token])
            state = state + torch.einsum("hk,hv->hkv", k[token], beta[token, :, None] * (v[token] - held))
            outputs.append(torch.einsum("hkv,hk->hv", state, q[token]) / k.shape[2] ** 0.5)
            token += 1
    return torch.stack(outputs)


def test_convolution_starts_anew_at_each_border():
    layout = Layout.of(LENGTHS, CPU)
    x, weight = drawn(sum(LENGTHS), 6), drawn(6, 4)
    found = causal_convolution(x, weight, layout.positions)
    for first, last in layout.spans:
        alone = torch.nn.functional.conv1d(
            torch.nn.functional.pad(x[first:last].t()[None], (3, 0)), weight[:, None], groups=6
        )[0].t()
        assert torch.allclose(found[first:last], torch.nn.functional.silu(alone), atol=1e-6)
