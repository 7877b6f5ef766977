"""A box with the real agent and the real trainer on a tiny target, and a way to break it in mid-run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.agent.conftest import Box
from tests.trainer.conftest import make_release, make_target

LONG = {"train.steps": 100_000, "train.checkpoint_every": 5}
ROOT = Path(__file__).resolve().parents[2]


def deploy(box: Box) -> None:
    """Both halves of the payload, and the recipe `tiny`."""
    target = make_target(box.base / "target")
    release = make_release(box.base / "release", target)
    files = {
        f"{part}/{path.name}": path.read_bytes()
        for part in ("agent", "trainer")
        for path in (ROOT / "remote_payload" / part).glob("*.py")
    }
    files |= {
        path.relative_to(release).as_posix(): path.read_bytes()
        for path in release.rglob("*")
        if path.is_file()
    }
    files["trainer/real_main.py"] = files["trainer/__main__.py"]
    files["trainer/__main__.py"] = (Path(__file__).parent / "faulty_main.py").read_bytes()
    assert box.deploy(files).result["outcome"] == "deployed"


def start(box: Box, **args: Any) -> str:
    """Begin a run that does not end by itself, and wait for its first steps; its id."""
    answer = box.call("start", recipe="tiny", overrides=LONG, python=box.python, **args)
    run = str(answer.result["run"])
    box.wait_for(lambda: steps(box, run) >= 3, "its first steps", 120)
    return run


def steps(box: Box, run: str) -> int:
    path = box.run_dir(run) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def fault(box: Box, what: str) -> None:
    """`loader hang`, `target raise`, … (faulty_main.py); nothing for an end of it."""
    (Path(box.roots["lib"]) / "fault").write_text(what)


def log(box: Box, run: str) -> str:
    return (box.run_dir(run) / "train.log").read_text()
