"""Checkpoints that are not what was written: which one is resumed, and who says so."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import procs
from tests.agent.conftest import Answer, Box

from .table import fault

SAVES = {"save_every": 4}


@pytest.fixture
def trained(box: Box) -> tuple[Box, str, list[int]]:
    """A run of its own that was stopped with some checkpoints: (box, run, their steps)."""
    run = box.start(recipe=SAVES, resume="none").result["run"]
    box.wait_for(lambda: len(steps(box, run)) >= 3, "three checkpoints")
    box.call("stop")
    return box, run, steps(box, run)


def steps(box: Box, run: str) -> list[int]:
    return [each["step"] for each in box.call("snapshot", run=run).result["run"]["checkpoints"]]


def place(box: Box, run: str, step: int) -> Path:
    return box.run_dir(run) / "checkpoints" / f"step-{step:06d}"


def resumed(box: Box) -> tuple[dict[str, object] | None, list[str]]:
    """(what the next start goes on from, its notes)."""
    answer: Answer = box.start(recipe=SAVES)
    box.call("stop", grace_s=5.0)
    return answer.result["resume_from"], [note["text"] for note in answer.notes]


def cut_proof(checkpoint: Path) -> None:
    text = (checkpoint / "complete.json").read_text()
    (checkpoint / "complete.json").write_text(text[: len(text) // 2])


def cut_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"x" * 50)
    facts = {"bytes": 100, "sha256": "ab"}
    proof = json.loads((checkpoint / "complete.json").read_text())
    (checkpoint / "complete.json").write_text(json.dumps({**proof, "files": {"model.safetensors": facts}}))


def lose_weights(checkpoint: Path) -> None:
    cut_weights(checkpoint)
    (checkpoint / "model.safetensors").unlink()


@fault(
    "a checkpoint's record is cut short",
    promised="the checkpoint before it is resumed, and a line says so",
    seen="`is damaged: it is not resumed`",
)
@fault(
    "a checkpoint's weights are cut short or gone",
    promised="the checkpoint before it is resumed, and a line says so",
    seen="`is damaged: it is not resumed`",
)
@pytest.mark.parametrize("damage", [cut_proof, cut_weights, lose_weights])
def test_the_checkpoint_before_a_cut_one_is_resumed(
    trained: tuple[Box, str, list[int]], damage: Callable[[Path], None]
) -> None:
    box, run, saved = trained
    damage(place(box, run, saved[-1]))
    assert steps(box, run) == saved[:-1], "status counts the whole ones alone"
    point, notes = resumed(box)
    assert point is not None and (point["run"], point["step"]) == (run, saved[-2])
    told = [note for note in notes if "damaged" in note]
    assert told == [f"checkpoint step-{saved[-1]:06d} of {run} is damaged: it is not resumed"]


@fault(
    "a run's record (`run.json`) is cut short, the run is dead",
    promised="never a silent start from nothing: what is passed over is named",
    seen="`its run.json cannot be read: it is not resumed`",
)
def test_a_run_without_its_record_is_named_when_it_is_passed_over(
    trained: tuple[Box, str, list[int]],
) -> None:
    box, run, _ = trained
    (box.run_dir(run) / "run.json").write_text('{"id": "r-0')
    point, notes = resumed(box)
    assert point is None or point["run"] != run
    assert f"{run} has checkpoints, but its run.json cannot be read: it is not resumed" in notes


def test_what_a_run_without_a_checkpoint_of_its_own_stands_on_is_looked_at_too(
    trained: tuple[Box, str, list[int]],
) -> None:
    box, run, saved = trained
    second = box.start(recipe={**SAVES, "step_s": 20.0}).result
    assert second["resume_from"]["step"] == saved[-1]
    for proc in box.scope(second["run"]):
        procs.send(proc, signal.SIGKILL)
    box.wait_for(lambda: not box.scope(second["run"]), "its end before its first checkpoint")
    cut_weights(place(box, run, saved[-1]))
    point, notes = resumed(box)
    assert point is not None and (point["run"], point["step"]) == (run, saved[-2])
    assert f"checkpoint step-{saved[-1]:06d} of {run} is damaged: it is not resumed" in notes
