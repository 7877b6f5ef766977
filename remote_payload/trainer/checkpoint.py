"""A checkpoint is whole or absent: written aside, flushed, renamed; resume needs nothing but the step."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.drafter import Drafter
from trainer.errors import Refusal, last_line
from trainer.optimizer import Optimizer

MUST_MATCH = ("config_hash", "data_sha256")


def save(
    folder: Path,
    step: int,
    drafter: Drafter,
    optimizer: Optimizer,
    config: dict[str, Any],
    keep: int,
    best: int | None = None,
) -> Path:
    """Write `folder/step-000120` after 120 steps, then remove all but the `keep` newest up to it and that of
    step `best`; returns its path.

    `config` is kept beside the tensors; a run that continues must agree with its MUST_MATCH entries. Raises
    Refusal where the disk does not take it; nothing of it is left there then.
    """
    final = folder / name_of(step)
    aside = folder / f".incoming-{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _write(aside, step, drafter, optimizer, config)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)  # half a checkpoint would keep a full disk full
        raise Refusal(
            f"the checkpoint of step {step} cannot be written ({error}): free room in {folder}"
        ) from None
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    _flush(folder)
    # What lies beyond this step is of an earlier training in the same folder: not this one's to remove.
    for old in [path for path in complete(folder) if _number(path) <= step][:-keep]:
        if best is None or old.name != name_of(best):
            shutil.rmtree(old)
    return final


def _write(aside: Path, step: int, drafter: Drafter, optimizer: Optimizer, config: dict[str, Any]) -> None:
    aside.mkdir(parents=True)
    weights = {name: p.detach().cpu().contiguous() for name, p in drafter.named_parameters()}
    save_file(weights, aside / "model.safetensors")
    save_file(
        {n: t.cpu().contiguous() for n, t in optimizer.tensors().items()}, aside / "optimizer.safetensors"
    )
    (aside / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (aside / "complete.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    for path in (*aside.iterdir(), aside):
        _flush(path)


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def complete(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted((p for p in folder.glob("step-*") if (p / "complete.json").is_file()), key=_number)


def _number(path: Path) -> int:
    """Names sort wrongly from step 1,000,000 on."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def check(path: Path, config: dict[str, Any]) -> int:
    """Steps done in the checkpoint. Refuses a broken folder, another configuration, other data."""
    try:
        step = int(json.loads((path / "complete.json").read_text(encoding="utf-8"))["step"])
        saved = dict(json.loads((path / "config.json").read_text(encoding="utf-8")))
        if step < 1:
            raise ValueError(f"step {step}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Refusal(f"checkpoint {path} is not whole ({error}): resume from another one") from None
    for name in MUST_MATCH:
        if saved.get(name) != config[name]:
            raise Refusal(
                f"checkpoint {path} was made with {name} {saved.get(name)}, this run has {config[name]}: "
                "start with the same recipe, overrides and data, or without resume"
            )
    return step


def load(path: Path, step: int, drafter: Drafter, optimizer: Optimizer) -> None:
    """Restore one replica from a checkpoint that `check` has passed."""
    try:
        drafter.load_state_dict(load_file(path / "model.safetensors"))
        optimizer.load(load_file(path / "optimizer.safetensors"), step)
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise Refusal(f"checkpoint {path} is damaged ({last_line(error)}): resume from another") from None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
