"""Conversations to documents to rows: what is supervised, what is refused, an order without memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from trainer.data import Document, RowOrder, load_corpus, load_tokenizer, pack
from trainer.errors import Refusal

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "\nHello you"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "Yes."},
]


def test_a_conversation_of_no_use_is_counted_with_its_reason(tmp_path: Path, tokenizer):
    path = tmp_path / "chats.jsonl"
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}, CHAT[1]]
    lines = [{"id": "good", "conversations": CHAT}, {"conversations": CHAT[:1]}, {"conversations": image}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = load_corpus(path, tokenizer, max_document=100)
    assert [d.key for d in corpus.documents] == ["good"]
    assert corpus.dropped == {"no assistant turn": 1, "holds more than text": 1}
    assert "dropped 1: no assistant turn" in corpus.summary()


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tokenizer.json", None, "no tokenizer.json there: fetch the tokenizer"),
        ("tokenizer.json", "[", r"its tokenizer cannot be loaded \(Expecting value.*fetch config.json and"),
        ("tokenizer_config.json", "3", "its tokenizer cannot be loaded"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_told_from_one_that_is_damaged(
    tmp_path, tiny_target, name, text, complaint
):
    folder = Path(shutil.copytree(tiny_target, tmp_path / "model"))
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    with pytest.raises(Refusal, match=complaint):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", r"chats\.jsonl:2: not JSON"),
        ('{"id": "x"}', r'chats\.jsonl:2: no list "conversations"; write'),
        ('{"conversations": [{"role": "user"}]}', r'chats\.jsonl:2: turn 0 has no text "content"'),
        ('["a"]', r'chats\.jsonl:2: no list "conversations"'),
        (
            '{"conversations": [{"role": "user", "content": 3}]}',
            r'chats\.jsonl:2: turn 0 has no text "content"',
        ),
        ('{"conversations": [{"content": "x"}]}', r'chats\.jsonl:2: turn 0 has no text "role"'),
        ('{"tools": 3, "conversations": [{"role": "user", "content": "x"}]}', r'jsonl:2: "tools" is no list'),
    ],
)
def test_a_malformed_line_is_refused_with_its_place_and_the_mend(
    tmp_path: Path, line: str, complaint: str, tokenizer
):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"id": "ok", "conversations": CHAT}) + "\n" + line + "\n")
    with pytest.raises(Refusal, match=complaint):
        load_corpus(path, tokenizer, max_document=100)


def test_a_missing_file_is_refused(tmp_path: Path, tokenizer):
    with pytest.raises(Refusal, match=r"none\.jsonl: cannot be read"):
        load_corpus(tmp_path / "none.jsonl", tokenizer, max_document=100)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, tokenizer):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps({"conversations": CHAT}).encode() + b"\n\xff\n")
    with pytest.raises(Refusal, match="not UTF-8 after line"):
        load_corpus(path, tokenizer, max_document=100)


def test_documents_are_cut_and_short_ones_dropped(tmp_path: Path, tokenizer):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"id": "a", "conversations": CHAT}) + "\n")
    assert len(load_corpus(path, tokenizer, max_document=35).documents[0].ids) == 35
    with pytest.raises(Refusal, match=r"no usable conversation \(1: fewer than 99 supervised tokens\)"):
        load_corpus(path, tokenizer, max_document=100, min_supervised=99)


def documents(count: int) -> list[Document]:
    return [
        Document(torch.full((5 + i % 23,), i), torch.ones(5 + i % 23, dtype=torch.bool), str(i))
        for i in range(count)
    ]


def test_each_epoch_holds_every_document_once_in_another_order():
    order = RowOrder(documents(60), budget=64, seed=7)
    per_epoch = len(order._plan(0))
    rows = [order.row(r) for r in range(per_epoch)]
    seen = sorted(number for row in rows for number in row.ids[row.doc_ids >= 0].unique().tolist())
    assert seen == list(range(60))
    assert sum(row.tokens for row in rows) == sum(len(d.ids) for d in documents(60))
    assert not torch.equal(rows[0].ids, order.row(per_epoch).ids)


def test_a_row_is_the_same_whichever_rows_were_asked_for_before():
    walked = RowOrder(documents(60), budget=64, seed=7)
    all_rows = [walked.row(r) for r in range(70)]
    for r in (69, 3, 40):
        fresh = RowOrder(documents(60), budget=64, seed=7).row(r)
        assert fresh.index == r
        for name in ("ids", "loss_mask", "doc_ids", "positions"):
            assert torch.equal(getattr(fresh, name), getattr(all_rows[r], name))


def test_rows_restart_positions_and_mark_padding():
    row = pack(documents(2), 16)
    assert row.positions.tolist() == [*range(5), *range(6), *range(5)]
    assert row.doc_ids.tolist() == [0] * 5 + [1] * 6 + [-1] * 5
    assert not row.loss_mask[row.doc_ids < 0].any()
    assert row.tokens == 11


def test_an_order_that_is_told_where_epochs_begin_lays_out_only_the_epoch_that_is_asked_for(monkeypatch):
    walked = RowOrder(documents(60), budget=64, seed=7)
    asked = walked.starts[-1]
    while len(walked.starts) < 5:
        asked = walked.row(walked.starts[-1]).index
    told, planned = RowOrder(documents(60), budget=64, seed=7, starts=walked.starts), []
    honest = told._plan
    monkeypatch.setattr(told, "_plan", lambda epoch: planned.append(epoch) or honest(epoch))
    assert torch.equal(told.row(asked).ids, walked.row(asked).ids)
    assert planned == [3]
    assert told.row(walked.starts[-1] + 200).index == walked.starts[-1] + 200, "and it goes on by itself"
