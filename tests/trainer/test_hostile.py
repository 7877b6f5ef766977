"""A careless user, a damaged file, a full disk: one line with the mend, or no harm at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.faults.table import fault
from trainer import checkpoint, prepare, prepared, verify
from trainer.__main__ import main
from trainer.config import load_recipe
from trainer.data import load_corpus
from trainer.drafter import Drafter, initialise
from trainer.errors import Refusal
from trainer.export import checkpoint_config, export
from trainer.geometry import resolve
from trainer.record import RunRecord
from trainer.regenerate_server import _Again, message_of


@pytest.fixture(autouse=True)
def _signals_of_the_test_runner_stay(monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)


def train(tmp_path, release, capsys, overrides=None, *, resume=None, name="run"):
    """(exit code, last line of stderr, log) of a whole run in this process."""
    run_dir = tmp_path / name
    run_dir.mkdir(exist_ok=True)
    order = {
        "release_dir": str(release),
        "recipe": "tiny",
        "overrides": overrides or {},
        "resume_from": {"path": str(resume)} if resume else None,
    }
    (run_dir / "run.json").write_text(json.dumps(order))
    code = main(["--run-dir", str(run_dir)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err, said.err
    return code, (said.err.splitlines() or [""])[-1], said.out


def changed_target(tmp_path, target, change, config=None):
    """A copy of the target with other tensors or another config.json."""
    folder = tmp_path / "changed"
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def to_fp8(tensors):
    for name in tensors:
        if "_proj" in name:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def spoil(name):
    return lambda tensors: tensors[name][3].fill_(float("nan"))


def keep_rows(rows):
    def cut(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:rows].clone()

    return cut


@fault(
    "a target's shard is quantised, has NaN, or belongs to another tokenizer",
    promised="refused before the training, with the tensor and the mend",
    seen="`lm_head.weight has NaN or infinite values: fetch it again`",
    part="files",
)
@pytest.mark.parametrize(
    ("change", "config", "complaint"),
    [
        (to_fp8, None, "is stored as F8_E4M3, a quantised checkpoint: take the bf16 one"),
        (spoil("lm_head.weight"), None, "lm_head.weight has NaN or infinite values: fetch it again"),
        (spoil("model.embed_tokens.weight"), None, "embed_tokens.weight has NaN or infinite values"),
        (keep_rows(100), {"vocab_size": 100}, "is beyond the target's vocabulary of 100"),
        (dict, {"num_attention_heads": 3}, "is not a multiple of the number of attention heads"),
        (dict, {"hidden_size": "x"}, "hidden_size is 'x'"),
        (dict, {"intermediate_size": None}, "intermediate_size is None"),
        (dict, {"rope_theta": "x"}, "rope_theta is 'x'"),
        (dict, {"text_config": 3}, "not the configuration of a model"),
    ],
)
def test_a_target_that_would_teach_nonsense_is_refused(
    tmp_path, tiny_release, tiny_target, capsys, change, config, complaint
):
    folder = changed_target(tmp_path, tiny_target, change, config)
    code, said, _ = train(tmp_path, tiny_release, capsys, {"target.model": str(folder)})
    assert code == 2
    assert complaint in said


@fault(
    "a target's shard has a ruined header",
    promised="one line with the file, no traceback",
    seen="`cannot be read as safetensors`",
    part="files",
)
@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a":{"data_offsets":[0]}}',
        b'{"a":{"data_offsets":[0,4],"dtype":"F32"}}',
        b"[" * 100_000,
    ],
)
def test_a_shard_whose_header_is_nonsense_is_refused(tmp_path, tiny_release, tiny_target, capsys, header):
    folder = changed_target(tmp_path, tiny_target, dict)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    code, said, _ = train(tmp_path, tiny_release, capsys, {"target.model": str(folder)})
    assert code == 2
    assert "cannot be read as safetensors" in said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"name: \xff\n", "not YAML: 'utf-8' codec"),
        (b"name: \x00\n", "not YAML: unacceptable character"),
        (b"name: 2026-13-45\n", "name is no value (month must be in 1..12): write text in quotes"),
        (b"name: !!python/object/apply:os.getcwd []\n", "name is no value"),
        (b"name: &a [*a]\n", "name is no value (found unconstructable recursive node)"),
        (b"? [a, b]\n: c\n", "a key is a word"),
        (b"[" * 3000, "not YAML"),
    ],
)
def test_a_recipe_that_is_no_text_or_no_value_is_refused_with_its_place(tmp_path, text, complaint):
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    with pytest.raises(Refusal) as refused:
        load_recipe(str(path), tmp_path)
    assert str(refused.value).startswith(str(path))
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"step": null}', '{"step": -4}', '{"step": 1e999}', "[" * 99_999]
)
def test_a_checkpoint_whose_record_is_nonsense_is_refused(tmp_path, text):
    (tmp_path / "complete.json").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match="is not whole"):
        checkpoint.check(tmp_path, {"config_hash": None, "data_sha256": None})


def test_optimizer_state_of_another_shape_is_refused_and_never_read_beyond(tmp_path, tiny_release, capsys):
    overrides = {"train.steps": 3, "train.checkpoint_every": 2}
    assert train(tmp_path, tiny_release, capsys, overrides)[0] == 0
    saved = tmp_path / "run/checkpoints/step-000002"
    moments = load_file(saved / "optimizer.safetensors")
    moments["exp_avg.fc.weight"] = torch.zeros(1)
    save_file(moments, saved / "optimizer.safetensors")
    (saved / "complete.json").write_text('{"step": 2}')  # as before there were checksums
    code, said, _ = train(tmp_path, tiny_release, capsys, overrides, resume=saved, name="again")
    assert code == 2
    assert "exp_avg.fc.weight is of shape [1]): resume from another" in said


def test_a_new_training_in_an_old_folder_keeps_what_it_saves(tmp_path, tiny_release, capsys):
    assert train(tmp_path, tiny_release, capsys, {"train.steps": 12})[0] == 0
    assert train(tmp_path, tiny_release, capsys, {"train.steps": 4})[0] == 0
    state = json.loads((tmp_path / "run/state.json").read_text())
    assert Path(state["last_checkpoint"]["path"]).is_dir()


def test_checkpoints_are_counted_beyond_a_million_steps(tmp_path):
    for step in (999_999, 1_000_000, 2):
        folder = tmp_path / checkpoint.name_of(step)
        folder.mkdir()
        (folder / "complete.json").write_text("{}")
    assert [path.name for path in checkpoint.complete(tmp_path)][-1] == "step-1000000"


@fault(
    "a second trainer in a run's folder",
    promised="refused; the first one's files stay whole",
    seen="`another trainer is writing there`",
    part="files",
)
def test_a_second_trainer_in_the_same_folder_is_refused(tmp_path, tiny_release, capsys):
    (tmp_path / "run").mkdir()
    first = RunRecord(tmp_path / "run", steps=5)
    try:
        code, said, _ = train(tmp_path, tiny_release, capsys)
        assert code == 2
        assert "another trainer is writing there" in said
        assert json.loads((tmp_path / "run/state.json").read_text())["steps"] == 5
    finally:
        first.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, tiny_release, capsys):
    recipe = str(tiny_release / "recipes/tiny.yaml")
    assert main(["--run-dir", "/dev/null/run", "--recipe", recipe]) == 2
    assert "--run-dir /dev/null/run cannot be written (Not a directory)" in capsys.readouterr().err


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(tmp_path, tiny_release, capsys, monkeypatch):
    honest, saves = checkpoint.save_file, []

    def full_at_first(tensors, path):
        saves.append(path)
        (full_disk if len(saves) < 3 else honest)(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full_at_first)
    code, _, log = train(tmp_path, tiny_release, capsys, {"train.steps": 6, "train.checkpoint_every": 2})
    assert code == 0
    assert "the checkpoint of step 2 cannot be written" in log and "training goes on" in log
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())] == ["step-000006"]


@fault(
    "disk full at the last checkpoint",
    promised="the run ends in one line, with what to free",
    seen="exit 2, `No space left on device`, `free`",
    part="place",
)
def test_a_disk_that_is_full_at_the_end_is_told_in_one_line(tmp_path, tiny_release, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    code, said, _ = train(tmp_path, tiny_release, capsys, {"train.steps": 2})
    assert code == 2
    assert "the checkpoint of step 2 cannot be written ([Errno 28] No space left on device): free" in said
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_the_heartbeat_outlives_a_full_disk(tmp_path, capsys):
    record = RunRecord(tmp_path, steps=5)
    (tmp_path / ".state.json").mkdir()  # nothing can be written there
    record.progress(step=1)
    record.progress(step=2)
    assert capsys.readouterr().out.count("state.json cannot be written") == 1
    (tmp_path / ".state.json").rmdir()
    assert any(thread.name == "heartbeat" for thread in threading.enumerate())
    record.close()
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 2


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"ids": lambda x: x[:50].clone()}, "ids and mask do not belong together"),
        ({"ids": lambda x: -x - 1}, "a token below 0"),
        ({"starts": lambda x: x * 2}, "starts do not divide"),
        ({"starts": lambda x: x.flip(0).clone()}, "starts do not divide"),
        ({"keys": lambda x: torch.frombuffer(bytearray(b"5"), dtype=torch.uint8)}, "not one key a document"),
    ],
)
def test_a_prepared_file_whose_parts_do_not_fit_is_refused(
    tmp_path, tiny_release, tiny_target, tokenizer, bad, complaint
):
    made = tmp_path / "made.safetensors"
    source = str(tiny_release / "examples/train.jsonl")
    assert prepare.main([source, "--model", str(tiny_target), "--out", str(made), "--workers", "1"]) == 0
    from safetensors import safe_open

    with safe_open(made, "pt") as file:
        meta, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert prepared._HEADER in meta
    save_file({n: bad.get(n, torch.clone)(t) for n, t in tensors.items()}, made, metadata=meta)
    with pytest.raises(Refusal, match=complaint):
        load_corpus(made, tokenizer, max_document=128)


@pytest.mark.parametrize(
    ("answer", "more", "reason"),
    [
        ("bad \\ud83d end", {}, "holds half a character"),
        ("fine", {"tools": [1]}, "the chat template refuses it"),
        ("fine", {"chat_template_kwargs": {"continue_final_message": True}}, "the chat template refuses it"),
    ],
)
def test_a_conversation_that_no_template_takes_is_dropped_with_the_reason(
    tmp_path, tokenizer, answer, more, reason
):
    good = '{"id": "g", "conversations": [{"role": "user", "content": "hi"}, %s]%s}\n'
    turn = '{"role": "assistant", "content": "%s"}'
    path = tmp_path / "x.jsonl"
    extra = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in more.items())
    path.write_text(good % (turn % answer, extra) + good % (turn % "whole \\ud83d\\ude00", ""))
    corpus = load_corpus(path, tokenizer, max_document=128)
    assert len(corpus.documents) == 1
    assert [name for name in corpus.dropped if reason in name]


def test_a_line_nested_without_end_is_refused_with_its_place(tmp_path, tokenizer):
    path = tmp_path / "x.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(Refusal, match=r"x\.jsonl:1: not JSON"):
        load_corpus(path, tokenizer, max_document=128)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"content": ["a"]}}]},
        {"choices": [{"message": {"content": {"x": 1}}}]},
        {"choices": [{"message": {"content": "a", "reasoning": 5}}]},
        {"choices": [{"message": {"content": "a"}}], "usage": [1]},
        {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": [1]}},
        {"choices": [{"message": "a"}]},
        {"choices": {}},
        [],
    ],
)
def test_an_answer_of_another_shape_is_asked_for_again(answer):
    with pytest.raises(_Again, match="unknown shape"):
        message_of(answer)


@pytest.fixture
def exported(tmp_path, tiny_release):
    geometry = resolve(load_recipe("tiny", tiny_release))
    drafter = Drafter(geometry)
    initialise(drafter, 0)
    return export(drafter, geometry, tmp_path / "export"), checkpoint_config(geometry)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**12},
        {"auto_map": {"AutoModel": "a" * 5000}},
        {"dtype": "\ud800"},
    ],
)
def test_verify_judges_a_hostile_config(exported, capsys, change):
    folder, config = exported
    (folder / "config.json").write_text(json.dumps(config | change))
    assert verify.main([str(folder)]) in (0, 1)
    capsys.readouterr().out.encode("utf-8", "backslashreplace")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_verify_does_not_wait_for_a_pipe(exported, capsys, name):
    folder, _ = exported
    with contextlib.suppress(FileNotFoundError):
        (folder / name).unlink()
    os.mkfifo(folder / name)
    assert verify.main([str(folder)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_verify_judges_a_config_nested_without_end(exported, capsys):
    folder, _ = exported
    (folder / "config.json").write_text("[" * 100_000)
    assert verify.main([str(folder)]) == 1
    assert "config.json cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 100_000,
        *(
            json.dumps({"release_dir": "", "recipe": "x", "overrides": {}, "resume_from": None} | change)
            for change in (
                {"release_dir": 3},
                {"recipe": None},
                {"resume_from": {"path": 3}},
                {"resume_from": "x"},
            )
        ),
    ],
)
def test_an_order_that_is_no_order_is_refused(tmp_path, capsys, text):
    (tmp_path / "run.json").write_text(text)
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "is not a run's record" in capsys.readouterr().err


def test_the_tiny_recipe_itself_is_fine(tiny_release):
    """The refusals above are of what was changed."""
    assert yaml.safe_load((tiny_release / "recipes/tiny.yaml").read_text())["train"]["steps"] == 20
    load_recipe("tiny", tiny_release)
