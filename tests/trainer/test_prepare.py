"""A prepared file is the same corpus as its jsonl, whoever made it, and is refused where it would not be."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.trainer.thinking_templates import HISTORY
from trainer.data import load_corpus, load_tokenizer
from trainer.errors import Refusal
from trainer.prepare import main, parts, render_part
from trainer.rendering import Renderer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """The tiny target's tokenizer with a template that hides earlier thoughts."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer(str(tiny_target))
    tokenizer.chat_template = HISTORY
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 conversations: some with thoughts and a second turn (two documents), some of no use, some long."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for n in range(700):
            turns = [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"answer {n}"}]
            if n % 3 == 0:
                turns[1]["reasoning_content"] = "because"
                turns += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so"}]
            if n % 50 == 1:
                turns = turns[:1]
            if n % 70 == 2:
                turns[1]["content"] *= 30
            file.write(json.dumps({"id": f"c{n}", "conversations": turns}) + "\n")
    return path


def prepare(chats: Path, model: Path, out: Path, *more: str) -> int:
    return main([str(chats), "--model", str(model), "--out", str(out), *more])


@pytest.fixture(scope="module")
def made(chats: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "corpus.safetensors"
    assert prepare(chats, model, out, "--max-document", "200", "--workers", "1") == 0
    return out


@pytest.mark.parametrize(("max_document", "min_supervised"), [(200, 1), (150, 12)])
def test_it_holds_the_documents_that_the_jsonl_gives(made, chats, model, max_document, min_supervised):
    limits = {"max_document": max_document, "min_supervised": min_supervised}
    tokenizer = load_tokenizer(str(model))
    plain, prepared = load_corpus(chats, tokenizer, **limits), load_corpus(made, tokenizer, **limits)
    assert len(plain.documents) == len(prepared.documents) > 200
    for one, other in zip(plain.documents, prepared.documents, strict=True):
        assert one.key == other.key
        assert torch.equal(one.ids, other.ids) and other.ids.dtype == torch.int64
        assert torch.equal(one.loss_mask, other.loss_mask) and other.loss_mask.dtype == torch.bool
    counts = [int(one.loss_mask.sum()) for one in plain.documents]
    assert plain.supervised == prepared.supervised == counts
    assert plain.highest == prepared.highest == max(int(one.ids.max()) for one in plain.documents)
    assert plain.dropped.total() == prepared.dropped.total() and plain.dropped["no assistant turn"] == 14
    assert plain.dropped == prepared.dropped or max_document < 200  # then each says where it was cut
    assert min_supervised > 1 or "c3#2" in {d.key for d in plain.documents}


def test_workers_change_nothing_and_a_bad_line_is_named_from_theirs(chats, model, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(chats.read_text() + '{"id": "x"}\n')
    alone, shared = (parts(bad, str(model), 200, workers) for workers in (1, 2))
    for _ in range(2):  # the third chunk holds the bad line
        one, other = next(alone), next(shared)
        assert one.ids.tobytes() == other.ids.tobytes() and one.mask.tobytes() == other.mask.tobytes()
        assert one.keys == other.keys and one.dropped == other.dropped and one.size == other.size
    with pytest.raises(Refusal, match=rf'{bad}:701: no list "conversations"'):
        next(shared)


def test_the_same_file_comes_of_the_same_conversations(made, chats, model, tmp_path):
    out = tmp_path / "corpus.safetensors"
    assert prepare(chats, model, out, "--max-document", "200", "--workers", "1") == 0
    assert out.read_bytes() == made.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.safetensors"]


def test_the_report_counts_what_was_kept_lost_and_split(chats, model, tmp_path, capsys):
    out = tmp_path / "corpus.safetensors"
    assert prepare(chats, model, out, "--max-document", "200", "--workers", "1") == 0
    said = capsys.readouterr()
    corpus = load_corpus(out, load_tokenizer(str(model)), max_document=200)
    lengths = [len(d.ids) for d in corpus.documents]
    share = sum(int(d.loss_mask.sum()) for d in corpus.documents) / sum(lengths)
    assert (
        f"{len(lengths)} documents from 686 conversations, {sum(lengths):,} tokens, {share:.1%} super"
        in said.out
    )
    assert f"{len(lengths) - 686} documents more than conversations: the template rewrites" in said.out
    assert "dropped 14: no assistant turn" in said.out
    assert f"cut {sum(n == 200 for n in lengths)} documents at 200 tokens" in said.out
    assert f"min {min(lengths)}  " in said.out and f"max {max(lengths)}" in said.out
    histogram = [line.split() for line in said.out.splitlines() if line.strip().startswith("<=")]
    assert sum(int(count) for _, _, count, *_ in histogram) == len(lengths)
    assert "tok/s with 1 worker" in said.err


def another_template(tokenizer) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("<result>", "<answer>")


def another_tokenizer(tokenizer) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [(another_template, "another chat template"), (another_tokenizer, "another tokenizer")],
)
def test_it_is_refused_where_text_would_become_other_tokens(made, model, change, complaint):
    tokenizer = load_tokenizer(str(model))
    change(tokenizer)
    with pytest.raises(Refusal, match=rf"{complaint} than the target's .*; prepare it again"):
        load_corpus(made, tokenizer, max_document=200)


def test_it_is_accepted_after_the_tokenizer_was_used(made, model):
    tokenizer = load_tokenizer(str(model))
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=5)
    assert load_corpus(made, tokenizer, max_document=200).documents


def test_documents_cut_shorter_than_asked_for_are_refused(made, model):
    with pytest.raises(Refusal, match=r"cut at 200 tokens, data.max_document is 4096; .*--max-document 4096"):
        load_corpus(made, load_tokenizer(str(model)), max_document=4096)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "cannot be read"),
        (lambda path: save_file({"x": torch.ones(1)}, path), "no file of trainer.prepare"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.unlink() or path.mkdir(), "cannot be read"),
    ],
    ids=["cut", "foreign", "missing", "folder"],
)
def test_a_file_that_is_not_whole_is_refused(made, model, tmp_path, spoil, complaint):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(made.read_bytes())
    spoil(copy)
    with pytest.raises(Refusal, match=complaint):
        load_corpus(copy, load_tokenizer(str(model)), max_document=200)


def test_a_bad_line_leaves_nothing_behind(model, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "x"}\n')
    assert prepare(bad, model, tmp_path / "o.safetensors", "--workers", "1") == 2
    err = capsys.readouterr().err
    assert f'prepare: refused: {bad}:1: no list "conversations"' in err and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none.jsonl", "--out", "o.safetensors"], "none.jsonl: cannot be read"),
        (["c.jsonl", "--out", "o.bin"], "name it ….safetensors"),
        (["c.jsonl", "--out", "o.safetensors", "--model", "/none"], "target model /none: no such folder"),
        (["c.jsonl", "--out", "none/o.safetensors"], "none/o.safetensors: no such folder"),
        (["c.jsonl", "--out", "folder.safetensors"], "folder.safetensors: is a folder, or the conversations"),
        (["c.safetensors", "--out", "c.safetensors"], "c.safetensors: is a folder, or the conversations"),
        (["c.jsonl", "--out", "/proc/self/o.safetensors"], "nothing can be written in /proc/self"),
        (["c.jsonl", "--out", "o.safetensors", "--max-document", "0"], "must be at least 1"),
        (["empty.jsonl", "--out", "o.safetensors"], "no usable conversation (the file is empty)"),
        (
            ["c.jsonl", "--out", "o.safetensors", "--max-document", "3"],
            "1: nothing supervised within 3 tokens",
        ),
    ],
)
def test_refusals_are_one_line(arguments, complaint, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path("c.jsonl").write_text(json.dumps({"conversations": chat}))
    Path("empty.jsonl").touch()
    Path("c.safetensors").hardlink_to("c.jsonl")
    Path("folder.safetensors").mkdir()
    assert main(["--model", str(model), "--workers", "1", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_part_is_the_same_whatever_came_before(chats, model):
    renderer = Renderer(load_tokenizer(str(model)))
    lines = list(enumerate(chats.read_text().splitlines()[:6], 1))
    whole = render_part(renderer, lines, "f", 200)
    later = render_part(renderer, lines[3:], "f", 200)
    assert whole.ids[-len(later.ids) :].tolist() == later.ids.tolist()
    assert whole.keys[-len(later.keys) :] == later.keys


def test_an_interruption_leaves_nothing_behind(model, tmp_path, capsys, monkeypatch):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a " * 500}]
    (tmp_path / "long.jsonl").write_text((json.dumps({"conversations": turns}) + "\n") * 30_000)
    render, parts = render_part, []

    def second_part_meets_ctrl_c(*arguments):
        parts.append(arguments)
        if len(parts) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return render(*arguments)

    monkeypatch.setattr("trainer.prepare.render_part", second_part_meets_ctrl_c)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores it
    try:
        assert prepare(tmp_path / "long.jsonl", model, tmp_path / "o.safetensors", "--workers", "1") == 130
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["long.jsonl"]
