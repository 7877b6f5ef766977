"""The whole main job with the real target, as `make demo` does it, only shorter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # a minute on two idle cores


@pytest.fixture
def real(project, real_model: Path):
    """The project with the real model in its sandbox; a copy: the container sees no link out of it."""
    target = project.sandbox / "models" / real_model.name
    if not target.exists():
        shutil.copytree(real_model, target)
    return project


def test_the_whole_job_on_the_real_model(real) -> None:
    """deploy, start fresh, healthy, status, abort, resume, finish; the loss falls and the export is there."""
    assert real.ask("deploy")["outcome"] == "deployed"
    quick = [f"--set={s}" for s in ("train.steps=12", "train.eval_every=0", "train.eval_documents=4")]
    quick += ["--set=data.budget=512", "--set=train.anchors=32", "--set=train.checkpoint_every=4"]
    first = real.ask("restart", "--fresh-cache", *quick)
    assert first["start"]["cache"]["choice"] == "fresh"
    real.invoke("wait", "--until", "healthy", "--timeout", "800", timeout=850)
    screen = real.invoke("status")
    assert screen.splitlines()[0].startswith("sandbox/200  HEALTHY")
    assert "no NVIDIA GPU in this container" in screen
    assert len(screen.splitlines()) <= 25

    stopped = real.ask("abort")
    assert stopped["outcome"] == "stopped"
    assert stopped["lost_steps"] == 0
    assert real.ask("abort")["outcome"] == "nothing-to-stop"
    assert real.ask("status", code=5)["verdict"] == "stopped"

    resumed = real.ask("restart", *quick)
    assert resumed["start"]["resume_from"]["step"] == stopped["checkpoint"]["step"]
    real.invoke("wait", "--until", "finished", "--timeout", "800", timeout=850)
    done = real.ask("status")
    assert done["verdict"] == "finished"

    folder = "/var/lib/pctrun/runs"
    lines = real.sh(
        f"cat {folder}/{first['start']['run']}/metrics.jsonl {folder}/{resumed['start']['run']}/metrics.jsonl"
    )
    metrics = [json.loads(line) for line in lines.splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    listing = real.sh(f"ls {folder}/{resumed['start']['run']}/export")
    assert {"config.json", "model.safetensors"} <= set(listing.split())
