"""The drafter of a learning run comes from the program that users run: a recipe, a folder, an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

from bench.common import say

PAYLOAD = Path(__file__).parent.parent
GRACE_S = 60.0  # for the step in flight and a checkpoint


def run(recipe: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Train until the recipe's last step or for `seconds`; the folder gets recipe.yaml, run/ and train.log.

    A run that was stopped by the clock has no export; the last checkpoint is exported then. Raises
    RuntimeError with the log's end if the trainer fails.
    """
    path, run_dir, log = folder / "recipe.yaml", folder / "run", folder / "train.log"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "trainer", "--recipe", str(path), "--run-dir", str(run_dir)]
    say(f"$ python -m trainer --recipe {path} --run-dir {run_dir}")
    with subprocess.Popen(
        command, cwd=PAYLOAD, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as trainer:
        clock = threading.Timer(seconds, trainer.send_signal, [signal.SIGTERM])
        last_resort = threading.Timer(seconds + GRACE_S, trainer.kill)
        clock.start()
        last_resort.start()
        try:
            lines = _follow(trainer, log)
        finally:
            clock.cancel()
            last_resort.cancel()
    if trainer.returncode:
        raise RuntimeError(f"the trainer ended with {trainer.returncode}:\n" + "".join(lines[-15:]))
    state = json.loads((run_dir / "state.json").read_text(encoding="utf-8"))
    if not (run_dir / "export").exists():
        say("  the clock stopped the run: exporting its last checkpoint")
        _export_checkpoint(path, run_dir)
    return {
        name: state[name]
        for name in ("phase", "step", "steps", "step_time_s", "tokens_per_s", "loss", "tau", "kernels")
    }


def _environment() -> dict[str, str]:
    parts = [str(PAYLOAD), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parts)), "PYTHONUNBUFFERED": "1"}


def _follow(trainer: subprocess.Popen[str], log: Path) -> list[str]:
    """The trainer's lines, kept in `log`; every 25th step and all that is no step is shown."""
    lines: list[str] = []
    with log.open("w", encoding="utf-8") as file:
        for line in trainer.stdout or ():
            lines.append(line)
            file.write(line)
            file.flush()
            step = line.strip().split("/")[0]
            if not step.isdigit() or int(step) % 25 == 0:
                say(f"  | {line.rstrip()}")
    return lines


def _export_checkpoint(recipe: Path, run_dir: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from trainer.checkpoint import complete
    from trainer.config import load_recipe
    from trainer.drafter import Drafter
    from trainer.export import export
    from trainer.geometry import resolve

    checkpoints = complete(run_dir / "checkpoints")
    if not checkpoints:
        raise RuntimeError("the run was stopped before its first checkpoint: give it more time")
    geometry = resolve(load_recipe(str(recipe), PAYLOAD))
    with torch.device("meta"):
        drafter = Drafter(geometry)
    drafter.load_state_dict(load_file(checkpoints[-1] / "model.safetensors"), assign=True)
    export(drafter, geometry, run_dir / "export")
