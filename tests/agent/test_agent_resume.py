"""What a run could not go on from is known before anything is stopped for it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent import interpreter
from agent.call import Refusal
from trainer import resumable
from trainer.config import load_recipe

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"


def begun(box, **recipe):
    """A run that is alive; with `save_every` it has a checkpoint."""
    started = box.start(recipe={"seed": 0, **recipe}, resume="none").result
    folder = box.run_dir(started["run"])
    where = "checkpoints/*/complete.json" if "save_every" in recipe else "metrics.jsonl"
    box.wait_for(lambda: list(folder.glob(where)), f"{where} of {started['run']}")
    return started["run"]


def refused(box, alive, **wishes):
    """The refusal of a restart that has left the run alone."""
    error = box.call("restart", python=box.python, **wishes).error
    assert "stop" not in error and box.scope(alive)
    assert not (box.run_dir(alive) / "stop.json").exists()
    assert [path.name for path in box.run_dir(alive).parent.glob("r-*")] == [alive]
    return error["kind"], error["message"], error["hint"]


def test_another_training_is_refused_in_the_trainers_words_before_the_run_is_stopped(ready):
    run = begun(ready, save_every=2)
    kind, message, hint = refused(ready, run, like=run, overrides={"seed": 1})
    assert (kind, hint) == ("usage", "--from-scratch begins anew")
    assert message.endswith("was made with seed 0, this run has 1")
    same = {"recipe": "tiny", "overrides": {"behave": "train", "seed": 0, "save_every": 2}}
    same["overrides"]["data"] = "changed"  # the same configuration, so `auto` would resume it, too
    assert refused(ready, run, **same)[1].endswith("was made with data None, this run has changed")
    anew = ready.call("restart", python=ready.python, **same, resume="none").result
    assert anew["stop"]["run"] == run and anew["start"]["resume_from"] is None


def test_fewer_steps_than_a_run_that_is_alive_has_by_now_are_refused(ready):
    """Its checkpoint comes with the stop."""
    run = begun(ready)
    ready.wait_for(lambda: ready.file(run, "state.json")["step"] > 1, "two steps")
    kind, message, _ = refused(ready, run, like=run, overrides={"steps": 1})
    assert kind == "usage" and message.startswith(f"{run} stands at step ")
    assert message.endswith(", and train.steps is 1")


def test_a_run_that_has_nothing_to_go_on_from_is_refused_before_another_is_stopped(ready):
    died = ready.start("die", resume="none").error["run"]
    alive = begun(ready)
    error = ready.call("restart", like=died, python=ready.python).error
    assert error["message"] == f"run {died} has no checkpoint to go on from"
    assert "stop" not in error and ready.scope(alive)


def test_what_cannot_be_asked_yet_keeps_no_run_from_starting(ready):
    """A run without a checkpoint so far, and a release of before the question."""
    run = begun(ready)
    changed = {"behave": "train", "seed": 0, "data": "changed"}
    again = ready.call("restart", recipe="tiny", overrides=changed, python=ready.python).result["start"]
    assert again["resume_from"]["run"] == run
    ready.call("stop")
    ready.deploy(ready.payload(**{"trainer/resumable.py": None}))
    more = ready.call(
        "start", like=again["run"], release="current", overrides={"seed": 1}, python=ready.python
    )
    assert more.result["resume_from"]["run"] == again["run"]


def test_the_payload_is_asked_without_torch():
    code = "import sys; from trainer import resumable; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PAYLOAD).returncode == 0


@pytest.fixture
def checkpoint(tmp_path):
    """One of the embedded box's recipe, as far as it is looked at."""
    recipe = load_recipe("smollm2-135m", PAYLOAD)
    folder = tmp_path / "step-000010"
    folder.mkdir()
    (folder / resumable.PROOF).write_text(json.dumps({"step": 10}))
    (folder / "config.json").write_text(json.dumps(resumable.identity(recipe, PAYLOAD)))
    return folder


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train.steps": 400, "train.lr": 1e-4, "log.tensorboard": True}, None),
        ({"train.seed": 7}, "was made with train.seed 0, this run has 7: start with the same recipe"),
        ({"drafter.layers": 2}, "was made with drafter.layers "),
        ({"train.steps": 9}, "has 10 steps, this run ends after 9: raise train.steps"),
        ({"data.train": "examples/heldout.jsonl"}, "was made with data.train examples/conversations.jsonl"),
        ({"data.train": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read (No such file or directory)"),
    ],
)
def test_the_payload_knows_what_may_change(checkpoint, overrides, words):
    ask = (sys.executable, str(PAYLOAD), "smollm2-135m", overrides, str(checkpoint))
    if words is None:
        interpreter.refuse_another_training(*ask)
        return
    with pytest.raises(Refusal) as refusal:
        interpreter.refuse_another_training(*ask)
    assert words in refusal.value.message
    assert refusal.value.hint == ("" if "cannot be read" in words else "--from-scratch begins anew")


def test_other_data_under_the_same_name_are_refused_and_what_is_damaged_is_not(checkpoint):
    saved = json.loads((checkpoint / "config.json").read_text())
    other = saved | {"data_sha256": "0123456789abcdef", "data_file": None}
    (checkpoint / "config.json").write_text(json.dumps(other))
    ask = (sys.executable, str(PAYLOAD), "smollm2-135m", {}, str(checkpoint))
    with pytest.raises(Refusal) as refusal:
        interpreter.refuse_another_training(*ask)
    ours = saved["data_sha256"]
    assert f"was made with data_sha256 0123456789abcdef, this run has {ours}" in refusal.value.message
    (checkpoint / "config.json").write_text("{")
    interpreter.refuse_another_training(*ask)


def test_data_that_nobody_has_touched_are_not_hashed_again(checkpoint, tmp_path, monkeypatch, capsys):
    """Seen by a record whose hash is wrong: it passes as long as it is believed."""
    monkeypatch.setattr(resumable, "SETTLED_S", 0.0)
    data = tmp_path / "train.jsonl"
    data.write_text("one\n")
    overrides = {"data.train": str(data)}
    made = resumable.identity(load_recipe("smollm2-135m", PAYLOAD, overrides), PAYLOAD)
    (checkpoint / "config.json").write_text(json.dumps(made | {"data_sha256": "0123456789abcdef"}))

    def passes() -> bool:
        argv = ["smollm2-135m", "--checkpoint", str(checkpoint), "--overrides", json.dumps(overrides)]
        code, said = resumable.main(argv), json.loads(capsys.readouterr().out)
        assert code == 0 or "was made with data_sha256 0123456789abcdef" in said["error"]
        return code == 0

    assert passes()
    times = data.stat()
    data.write_text("two\n")  # in place, of the same size, with its time put back
    os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not passes()
    made = resumable.identity(load_recipe("smollm2-135m", PAYLOAD, overrides), PAYLOAD)
    (checkpoint / "config.json").write_text(json.dumps(made | {"data_sha256": "0123456789abcdef"}))
    assert passes()
    twin = tmp_path / "twin"
    shutil.copy2(data, twin)
    twin.replace(data)  # the same bytes and times, another file
    assert not passes()
    monkeypatch.setattr(resumable, "SETTLED_S", 60.0)  # written just now: a next write might not show
    assert resumable.identity(load_recipe("smollm2-135m", PAYLOAD, overrides), PAYLOAD)["data_file"] is None
