"""The real trainer on a disk that is really full: log, state, metrics and checkpoint lie on it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.conftest import tiny_release, tiny_target  # noqa: F401 - fixtures
from tests.trainer.test_run import Run

from .small import fill
from .table import fault

FULL_S = 3.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """24 MiB of their own: room for a few checkpoints."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@fault(
    "disk full under a training: run folder, log, checkpoint",
    promised="files lag, the training goes on; with room again they catch up; no step is lost",
    seen="every step in metrics.jsonl once; log: `cannot be written`; SIGTERM: exit 0, the last step saved",
)
def test_a_full_disk_costs_lines_and_checkpoints_but_no_step(
    disk: Path,
    tiny_release: Path,  # noqa: F811
) -> None:
    overrides = {"train.steps": 100_000, "train.checkpoint_every": 4}
    run = Run(disk / "r-0001", tiny_release, overrides)
    try:
        run.until(lambda: run.checkpoints() and run.steps() > 6)
        filler = fill(disk)
        full_at = time.time()
        time.sleep(FULL_S)
        assert run.process.poll() is None, run.log()
        filler.unlink()
        free_at = time.time()
        run.until(lambda: run.steps() and run.metrics()[-1]["time"] > free_at)
        run.until(lambda: run.state()["heartbeat"] > free_at)
        run.process.terminate()
        assert run.ended() == 0, run.log()
    finally:
        run.process.kill()
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert any(full_at + 0.5 < line["time"] < free_at for line in metrics), "it went on meanwhile"
    assert "cannot be written" in run.log()
    saved = json.loads((run.checkpoints()[-1] / "complete.json").read_text())
    assert saved["step"] == len(metrics) == run.state()["step"]
    assert run.state()["phase"] == "stopped"
