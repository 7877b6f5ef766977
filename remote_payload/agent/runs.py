"""A run is a folder of files: where they lie, how it gets its number, what a later one resumes."""

from __future__ import annotations

import math
import os
import re
import time
from typing import Any, Iterable, Iterator, NamedTuple

from agent import shapes
from agent.call import Refusal, Roots
from agent.files import number, read_json, write_json

DEFAULT_GRACE_S = 120.0  # for the step in flight and its checkpoint
PIN = "pin.json"
STEPS = "train.steps"  # how long a recipe trains
_ID = re.compile(r"r-(\d{4,})")
_CHECKPOINT = re.compile(r"step-(\d+)")


def ids(roots: Roots) -> list[str]:
    """Every run id, newest first."""
    try:
        names = os.listdir(roots.runs)
    except OSError:
        return []
    return sorted((name for name in names if _ID.fullmatch(name)), key=_serial, reverse=True)


def known(roots: Roots, marked: Iterable[str]) -> list[str]:
    """`ids`, and the runs whose processes (by folder, as `procs.marked` has them) outlived their folder."""
    living = {os.path.basename(path) for path in marked if os.path.dirname(path) == roots.runs}
    named = {run for run in living if _ID.fullmatch(run)}
    return sorted(named.union(ids(roots)), key=_serial, reverse=True)


def _serial(run: str) -> int:
    return int(run[2:])


def folder(roots: Roots, run: str) -> str:
    return os.path.join(roots.runs, run)


def require(roots: Roots, run: str) -> str:
    """The run's folder, or a refusal that names the newest runs."""
    path = folder(roots, run)
    if not _ID.fullmatch(run) or not os.path.isdir(path):
        known = ", ".join(ids(roots)[:5])
        raise Refusal(
            "no-run", f"there is no run {run!r}", f"the newest are {known}" if known else "none was started"
        )
    return path


def named(roots: Roots, run: str | None) -> str:
    """`run`, or the newest when none is named; refuses when there is none, or no such one."""
    if run is not None:
        require(roots, run)
        return run
    known = ids(roots)
    if not known:
        raise Refusal("no-run", "no run was started yet", "invoke restart")
    return known[0]


def pinned(roots: Roots) -> list[str]:
    """The folders of the runs that were marked to be kept, newest first."""
    paths = [folder(roots, run) for run in ids(roots)]
    return [path for path in paths if os.path.exists(os.path.join(path, PIN))]


def create(roots: Roots) -> tuple[str, str]:
    """Make the next run's folder; (id, path). `mkdir` is atomic, so two starters never share a number."""
    os.makedirs(roots.runs, exist_ok=True)
    serial = max((_serial(run) for run in ids(roots)), default=0)
    while True:
        serial += 1
        run = f"r-{serial:04d}"
        try:
            os.mkdir(folder(roots, run))
        except FileExistsError:
            continue
        return run, folder(roots, run)


class Checkpoint(NamedTuple):
    step: int
    path: str
    at: float


def checkpoints(run_dir: str) -> list[Checkpoint]:
    """The complete ones, by step: a folder is renamed into place, so its `complete.json` proves the rest. It
    names the files' sizes, too; their hashes are the trainer's to compare."""
    found = []
    for path in _checkpoint_folders(run_dir):
        proof = read_json(os.path.join(path, "complete.json"))
        step = number(proof, "step")
        try:
            if step is not None and _has_its_bytes(path, proof or {}):
                at = os.stat(os.path.join(path, "complete.json")).st_mtime
                found.append(Checkpoint(int(step), path, at))
        except OSError:
            continue  # the trainer has just retired it, or a file is gone
    return sorted(found)


def _checkpoint_folders(run_dir: str) -> list[str]:
    root = os.path.join(run_dir, "checkpoints")
    try:
        return [os.path.join(root, name) for name in os.listdir(root) if _CHECKPOINT.fullmatch(name)]
    except OSError:
        return []


def _has_its_bytes(path: str, proof: dict[str, Any]) -> bool:
    files = proof.get("files")
    wanted = files.items() if isinstance(files, dict) else ()
    return all(os.stat(os.path.join(path, name)).st_size == number(facts, "bytes") for name, facts in wanted)


def passed_over(roots: Roots, point: dict[str, Any] | None, config_hash: str) -> list[str]:
    """What a resume would rather have gone on from, had it not been damaged: a line for each, newest first.

    `point` is what `choose_resume` found instead."""
    lines = []
    for run in ids(roots):
        path, last = folder(roots, run), point is not None and run == point["run"]
        record = read_json(os.path.join(path, "run.json"))
        if record is None and checkpoints(path):
            lines.append(f"{run} has checkpoints, but its run.json cannot be read: it is not resumed")
        elif last or (record or {}).get("config_hash") == config_hash:
            if has_finished(path) and not last:
                break  # the search ended here
            whole = {each.path for each in checkpoints(path)}
            for each in sorted(set(_checkpoint_folders(path)) - whole, reverse=True):
                name = os.path.basename(each)
                if not last or int(name.partition("-")[2]) > (point or {})["step"]:
                    lines.append(f"checkpoint {name} of {run} is damaged: it is not resumed")
        if last:
            break
    return lines


def left_behind(roots: Roots, new: str, config_hash: str) -> list[str]:
    """A line when the run before `new` could go on, but is not gone on from: its configuration is another."""
    for run in [each for each in ids(roots) if each != new][:1]:
        record = read_json(os.path.join(folder(roots, run), "run.json")) or {}
        point = resume_point(roots, run)
        if point is None or record.get("config_hash") in (None, config_hash):
            continue
        if not has_finished(folder(roots, run)):
            says = f"{run} stays at step {point['step']}: its configuration is another"
            return [f"{says} (invoke restart --from {run} goes on with it)"]
        more = _more_steps(record, read_json(os.path.join(folder(roots, new), "run.json")) or {})
        if more > point["step"]:
            says = f"{run} has finished at step {point['step']}, this run begins anew"
            return [f"{says} (invoke restart --from {run} --set train.steps={more:g} trains on)"]
    return []


def _more_steps(before: dict[str, Any], record: dict[str, Any]) -> float:
    """The steps of a run that asks for what the one before it did, but for another number of them; else 0."""
    mine, theirs = record.get("overrides"), before.get("overrides")
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        return 0
    same = {**theirs, STEPS: mine.get(STEPS)} == mine and record.get("recipe") == before.get("recipe")
    return (number(mine, STEPS) or 0) if same else 0


def has_finished(run_dir: str) -> bool:
    """Whether training came to its end; `state.json` knows when the supervisor died before `exit.json`."""
    end = read_json(os.path.join(run_dir, "exit.json"))
    if end is not None:
        return end.get("reason") == "finished"
    return (read_json(os.path.join(run_dir, "state.json")) or {}).get("phase") == "finished"


def write_exit(run_dir: str, facts: dict[str, Any]) -> None:
    """`exit.json` from `code`, `signal`, `reason` and `detail`."""
    write_json(os.path.join(run_dir, "exit.json"), {"schema": 1, "at": time.time(), **facts})


def resume_point(roots: Roots, run: str) -> dict[str, Any] | None:
    """`{run, step, path}` of the last checkpoint, or of the newest whole one of those that the run stands on;
    None without."""
    limit, seen = math.inf, set()
    while run not in seen:
        seen.add(run)
        own = [each for each in checkpoints(folder(roots, run)) if each.step <= limit]
        if own:
            return {"run": run, "step": own[-1].step, "path": own[-1].path}
        handed = shapes.sound(read_json(os.path.join(folder(roots, run), "run.json")), shapes.RECORD) or {}
        source = handed.get("resume_from") or {}
        run, limit = source.get("run") or run, source.get("step") or 0
    return None


def choose_resume(roots: Roots, resume: str, config_hash: str) -> dict[str, Any] | None:
    """What a new run continues: nothing, the named run, or for `auto` the newest of the same configuration.

    A finished run ends the search: older checkpoints belong to a training that is done.
    """
    if resume == "none":
        return None
    if resume != "auto":
        require(roots, resume)
        point = resume_point(roots, resume)
        if point is None:
            raise Refusal(
                "usage",
                f"run {resume} has no checkpoint to go on from",
                f"invoke restart --from {resume} --from-scratch",
            )
        return point
    for run in _alike(roots, config_hash):
        if has_finished(folder(roots, run)):
            return None
        point = resume_point(roots, run)
        if point is not None:
            return point
    return None


def newest_alike(roots: Roots, config_hash: str) -> str | None:
    """The newest run of this configuration: what `auto` looks at first."""
    return next(_alike(roots, config_hash), None)


def _alike(roots: Roots, config_hash: str) -> Iterator[str]:
    for run in ids(roots):
        record = read_json(os.path.join(folder(roots, run), "run.json")) or {}
        if record.get("config_hash") == config_hash:
            yield run
