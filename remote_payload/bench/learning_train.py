"""The drafter of a learning run comes from the program that users run: a recipe, a folder, an exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

from bench.common import say
from bench.learning_plan import StageFailed

PAYLOAD = Path(__file__).parent.parent
PROBE = 40  # steps after which the time of a step is known
OFF = (0.25, 1.5)  # a run that would take less or more than these shares of its time is started again
START_S = 120.0  # at most, until the first step
EVALUATE_S = 60.0  # at most, all evaluations of a run
GRACE_S = 60.0  # for the step in flight and a checkpoint
SHOWN = 25  # every n-th step


def run(
    recipe: dict[str, Any], run_dir: Path, seconds: float, evaluations: int, label: str
) -> dict[str, Any]:
    """Train for about `seconds`; returns what state.json says at the end. Lines are shown under `label`.

    The cosine must end with the time, so the number of steps is fitted: if the first steps show that the
    recipe's number is far off, the run starts again with the right one. A run that the clock stops all the
    same has its last checkpoint exported. Raises StageFailed with the log's end if the trainer fails.
    """
    step_s = _train(recipe, run_dir, seconds, label, probe=True)
    if step_s is not None:
        steps = max(PROBE, round(seconds / step_s))
        say(f"  {label}: {step_s:.3f} s a step, so {steps:,} steps instead of {_steps(recipe):,}")
        every = max(1, steps // evaluations)
        recipe["train"] |= {"steps": steps, "eval_every": every, "checkpoint_every": every}
        _train(recipe, run_dir, seconds, label, probe=False)
    state = json.loads((run_dir / "state.json").read_text(encoding="utf-8"))
    if not (run_dir / "export").exists():
        say(f"  {label}: the clock stopped the run: exporting its last checkpoint")
        _export_checkpoint(run_dir)
    names = ("phase", "step", "steps", "step_time_s", "tokens_per_s", "loss", "tau", "kernels", "topology")
    return {name: state[name] for name in names}


def _steps(recipe: dict[str, Any]) -> int:
    return int(recipe["train"]["steps"])


def _train(recipe: dict[str, Any], run_dir: Path, seconds: float, label: str, *, probe: bool) -> float | None:
    """One run from its start. With `probe` it is broken off if its pace is wrong, and the pace returned."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    path = run_dir / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "trainer", "--recipe", str(path), "--run-dir", str(run_dir)]
    say(f"$ python {' '.join(command[1:])}")
    with subprocess.Popen(
        command, cwd=PAYLOAD, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as trainer:
        limit = START_S + OFF[1] * seconds + EVALUATE_S
        clock = threading.Timer(limit, trainer.send_signal, [signal.SIGTERM])
        last_resort = threading.Timer(limit + GRACE_S, trainer.kill)
        clock.start()
        last_resort.start()
        wrong: float | None = None
        tail: list[str] = []
        try:
            for line in _lines(trainer, run_dir / "train.log"):
                tail = [*tail[-14:], line]
                step = line.strip().split("/")[0]
                if not step.isdigit() or int(step) % SHOWN == 0:
                    say(f"  {label} | {line.rstrip()}")
                if probe and step == str(PROBE) and _steps(recipe) > PROBE:
                    wrong = _wrong_pace(run_dir, _steps(recipe), seconds)
                    if wrong is not None:
                        trainer.kill()
        finally:
            clock.cancel()
            last_resort.cancel()
    if wrong is None and trainer.returncode:
        raise StageFailed(f"the trainer ended with {trainer.returncode}:\n" + "".join(tail))
    return wrong


def _wrong_pace(run_dir: Path, steps: int, seconds: float) -> float | None:
    """Seconds of a step, if that many steps would take far less or more than `seconds`."""
    step_s = json.loads((run_dir / "state.json").read_text(encoding="utf-8"))["step_time_s"]
    if step_s is None or OFF[0] <= steps * step_s / seconds <= OFF[1]:
        return None
    return float(step_s)


def _environment() -> dict[str, str]:
    parts = [str(PAYLOAD), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parts)), "PYTHONUNBUFFERED": "1"}


def _lines(trainer: subprocess.Popen[str], log: Path) -> Any:
    """The trainer's lines as they come, kept in `log`."""
    with log.open("w", encoding="utf-8") as file:
        for line in trainer.stdout or ():
            file.write(line)
            file.flush()
            yield line


def _export_checkpoint(run_dir: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from trainer.checkpoint import complete
    from trainer.config import load_recipe
    from trainer.drafter import Drafter
    from trainer.export import export
    from trainer.geometry import resolve

    checkpoints = complete(run_dir / "checkpoints")
    if not checkpoints:
        raise StageFailed("the run was stopped before its first checkpoint: give it more time")
    geometry = resolve(load_recipe(str(run_dir / "recipe.yaml"), PAYLOAD))
    with torch.device("meta"):
        drafter = Drafter(geometry)
    drafter.load_state_dict(load_file(checkpoints[-1] / "model.safetensors"), assign=True)
    export(drafter, geometry, run_dir / "export")
