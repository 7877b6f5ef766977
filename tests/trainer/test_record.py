"""What was measured stays whole over the attempts of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.record import RunRecord


def measured(folder: Path, steps: int) -> Path:
    """A run that was killed after it had written these steps' metrics; its checkpoint of step 5."""
    folder.mkdir(exist_ok=True)
    record = RunRecord(folder, steps=9)
    record.begin(0, None, tensorboard=False)
    for step in range(1, steps + 1):
        record.metric(step=step, loss=10 - step)
    record.close()
    return folder / "checkpoints" / "step-000005"


@pytest.mark.parametrize("steps", [4, 5, 7])  # killed while it saved step 5, just after it, and later
def test_an_attempt_that_resumes_has_the_metrics_of_each_step_once(tmp_path, steps):
    resume = measured(tmp_path, steps)
    record = RunRecord(tmp_path, steps=9)
    record.begin(5, resume, {"step": 5, "loss": 5}, tensorboard=False)
    record.metric(step=6, loss=4)
    record.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "loss": 10 - step} for step in range(1, 7)]


def test_another_run_begins_with_its_own_first_step(tmp_path):
    resume = measured(tmp_path / "first", 4)
    (tmp_path / "second").mkdir()
    record = RunRecord(tmp_path / "second", steps=9)
    record.begin(5, resume, {"step": 5, "loss": 5}, tensorboard=False)
    record.metric(step=6, loss=4)
    record.close()
    assert json.loads((tmp_path / "second" / "metrics.jsonl").read_text()) == {"step": 6, "loss": 4}
