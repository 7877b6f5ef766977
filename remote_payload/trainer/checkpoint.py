"""A checkpoint is whole or absent: written aside, flushed, renamed; resume needs nothing but the step."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from trainer import checksums
from trainer.drafter import Drafter
from trainer.errors import Refusal, last_line
from trainer.optimizer import Optimizer
from trainer.resumable import PROOF, config_of, refuse_another
from trainer.weights import finite

WEIGHTS, MOMENTS = "model.safetensors", "optimizer.safetensors"


class Damaged(Refusal):
    """A checkpoint that is not what was written; an earlier one may be. `reason`: how, without its path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} is {reason}: resume from another one")
        self.reason = f"{path.name} is {reason}"


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

    `config` is kept beside the tensors: `resumable.identity`, by which `check` goes, and more. Raises Refusal
    where the disk does not take it; nothing of it is left there then.
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
    save_file(weights, aside / WEIGHTS)
    save_file({n: t.cpu().contiguous() for n, t in optimizer.tensors().items()}, aside / MOMENTS)
    (aside / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (aside / PROOF).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    for path in (*aside.iterdir(), aside):
        _flush(path)


class Sealer:
    """Adds the files' hashes to a checkpoint's proof while the training goes on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def seal(self, path: Path) -> None:
        """Returns at once. `wait` comes before anything is removed beside `path`."""
        self._thread = threading.Thread(target=seal, args=(path,), name="checksum")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def seal(path: Path) -> None:
    """Hash what lies in the page cache still. A checkpoint that goes meanwhile, or for whose hashes there is
    no room, stays without them."""
    aside = path.with_name(f".{path.name}.json")
    try:
        proof = json.loads((path / PROOF).read_text(encoding="utf-8"))
        proof["files"] = checksums.of(
            path, sorted(each.name for each in path.iterdir() if each.name != PROOF)
        )
        aside.write_text(json.dumps(proof) + "\n", encoding="utf-8")
        _flush(aside)
        aside.replace(path / PROOF)
    except OSError:
        aside.unlink(missing_ok=True)


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def complete(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted((p for p in folder.glob("step-*") if (p / PROOF).is_file()), key=_number)


def _number(path: Path) -> int:
    """Names sort wrongly from step 1,000,000 on."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def check(path: Path, config: dict[str, Any]) -> int:
    """Steps done in the checkpoint. Raises Damaged for a folder that is not what was written, Refusal for
    one that this run cannot go on from (see resumable.py). One that was not sealed has no hashes: only its
    headers are looked at."""
    try:
        proof = json.loads((path / PROOF).read_text(encoding="utf-8"))
        step = int(proof["step"])
        if step < 1 or _number(path) not in (step, -1):  # -1: a copy under a name of its own
            raise ValueError(f"{PROOF} names step {step}")
        wrong = checksums.damage(path, proof["files"]) if "files" in proof else _cut_short(path)
        saved = config_of(path) if not wrong else {}
    except OSError as error:
        raise Damaged(path, f"not whole ({Path(error.filename or path).name}: {error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(path, f"not whole (its record is none: {error})") from None
    if wrong:
        raise Damaged(path, f"damaged ({wrong})")
    refuse_another(path, step, saved, config)
    return step


def _cut_short(path: Path) -> str | None:
    """What is wrong with the first file of tensors whose header does not tell of exactly its bytes."""
    for name in (WEIGHTS, MOMENTS):
        try:
            with safe_open(path / name, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{name}: {last_line(error)}"
    return None


def newest_whole(path: Path, config: dict[str, Any]) -> tuple[Path, int, list[str]]:
    """`path`, or the newest one before it that is whole: (folder, its steps, a line for each that is not).

    Raises Refusal for another configuration or other data, and when none is left."""
    wrong: list[str] = []
    for place in (path, *_before(path)):
        try:
            return place, check(place, config), wrong
        except Damaged as damaged:
            wrong.append(damaged.reason)
    run = path.parent.parent.name
    raise Refusal(f"no checkpoint of {run} is whole, {wrong[0]}: start again with --from-scratch")


def _before(path: Path) -> Iterator[Path]:
    """Earlier checkpoints of the same training, newest first: those beside it, then what its run resumed."""
    seen = {path}
    while True:
        older = [each for each in complete(path.parent) if _number(each) < _number(path)]
        yield from reversed(older)
        try:
            order = json.loads((path.parent.parent / "run.json").read_text(encoding="utf-8"))
            path = Path(order["resume_from"]["path"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        if path in seen:
            return
        seen.add(path)
        yield path


def load(path: Path, step: int, drafter: Drafter, optimizer: Optimizer) -> None:
    """Restore one replica from a checkpoint that `check` has passed."""
    try:
        tensors = load_file(path / WEIGHTS)
        drafter.load_state_dict(tensors)
        optimizer.load(load_file(path / MOMENTS), step)
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        reason = last_line(error)
        reason = reason if len(reason) <= 200 else f"{reason[:200]}…"  # it may name every tensor
        raise Refusal(f"checkpoint {path} is damaged ({reason}): resume from another") from None
    for name, tensor in tensors.items():
        if not finite(tensor):
            raise Refusal(f"checkpoint {path}: {name} has NaN or infinite values: resume from another")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
