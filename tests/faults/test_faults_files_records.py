"""A run's own records, cut or ruined while it lives and when it has ended: a look never breaks on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.conftest import Box

from .looks import Look, look
from .table import fault


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    """What a power cut leaves on some file systems: the size without the bytes."""
    path.write_bytes(bytes(path.stat().st_size))


def nonsense(path: Path) -> None:
    path.write_text('{"step": {"step": []}, "phase": 7, "reason": ["x"], "created": "soon", "at": {}}')


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = (cut, empty, zeros, nonsense, nested, folder)
FILES = ("run.json", "state.json", "metrics.jsonl", "exit.json", "stop.json", "log.times", "provenance.json")


@pytest.fixture(scope="module")
def ended(box: Box) -> str:
    """A run that was stopped in order."""
    run = box.start(recipe={"save_every": 5}).result["run"]
    box.wait_for(lambda: box.file(run, "state.json")["step"] > 6, "some steps")
    box.call("stop", reason="enough")
    assert look(box).word == "stopped"
    (box.run_dir(run) / "log.times").write_text("1790000000.0 100\n1790000005.0 200\n")
    return str(run)


def every_damage(box: Box, run: str, name: str) -> Iterator[tuple[str, Look]]:
    """Each damage in turn, the look that it gives, and the file as it was again."""
    path = box.run_dir(run) / name
    whole = path.read_bytes()
    for damage in DAMAGES:
        damage(path)
        try:
            yield damage.__name__, look(box, run)
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.write_bytes(whole)


@fault(
    "`run.json`, `state.json`, `metrics.jsonl`, `stop.json` or `log.times` of a run that has ended is cut, "
    "empty, full of zeros, nonsense or a folder",
    promised="never a traceback; how it ended stands in `exit.json` and stays",
    seen="`stopped`, exit 5",
)
@pytest.mark.parametrize("name", [name for name in FILES if name != "exit.json"])
def test_a_damaged_record_of_a_run_that_has_ended(box: Box, ended: str, name: str) -> None:
    for damage, seen in every_damage(box, ended, name):
        assert (seen.word, seen.exit_code) == ("stopped", 5), damage
        assert "Traceback" not in seen.screen, damage
        listed = box.call("runs", runs=[ended], detail=True).result["runs"]
        assert [each["id"] for each in listed] == [ended], damage
        if name == "run.json":
            assert "not from this run: its run.json cannot be read" in seen.screen.splitlines()[-1], damage


@fault(
    "`exit.json` is damaged in any of these ways",
    promised="the trainer's own last state is believed; without one it is no success",
    seen="`stopped`, with `its last state says so`; with a damaged `state.json` as well `crashed`",
)
def test_a_damaged_exit_file(box: Box, ended: str) -> None:
    for damage, seen in every_damage(box, ended, "exit.json"):
        assert (seen.word, seen.exit_code) == ("stopped", 5), damage
        assert "its last state says so" in seen.screen, damage
        state = box.run_dir(ended) / "state.json"
        whole = state.read_bytes()
        cut(state)
        both = look(box, ended)
        state.write_bytes(whole)
        assert (both.word, both.exit_code) == ("crashed", 4), damage
        assert "vanished and its state cannot be read" in both.screen, damage


@fault(
    "`run.json` of a living run is damaged or gone",
    promised="the run goes on, every look says so, `abort` stops it without loss",
    seen="`degraded`, exit 2: `its run.json is gone or damaged`",
)
@fault(
    "`state.json` of a living run is damaged",
    promised="whole again within a heartbeat; the look between is no end of the run",
    seen="`starting` for that look, then as before",
)
def test_a_living_run_whose_records_are_damaged(box: Box) -> None:
    run = box.start(recipe={"save_every": 5, "step_s": 0.3}, resume="none").result["run"]
    box.wait_for(lambda: box.file(run, "state.json")["step"] > 1, "some steps")
    for damage, seen in every_damage(box, run, "run.json"):
        assert (seen.word, seen.exit_code, seen.causes) == ("degraded", 2, ("record-lost",)), damage
        assert "its run.json is gone or damaged" in seen.screen
    words: set[str] = set()
    for damage in (cut, empty, zeros, nonsense, nested):
        damage(box.run_dir(run) / "state.json")
        words.add(look(box, run).word)
        box.wait_for(lambda: look(box, run).word == "warming-up", "its next state")
    assert words <= {"starting", "warming-up"}, words
    for damage, seen in every_damage(box, run, "metrics.jsonl"):
        assert seen.exit_code == 6, (damage, seen.screen)
    (box.run_dir(run) / "run.json").unlink()
    assert look(box, run).causes == ("record-lost",)
    stopped = box.call("stop").result
    assert (stopped["outcome"], stopped["survivors"]) == ("stopped", [])
    assert stopped["checkpoint"]["step"] == json.loads(state_text(box, run))["step"], "no step is lost"


def state_text(box: Box, run: str) -> str:
    return (box.run_dir(run) / "state.json").read_text()
