"""All that `status` needs in one bounded look: facts, no opinion, no change, no file read whole."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable

from agent import (
    baseline,
    gpu,
    kernel_log,
    lock,
    logtimes,
    procs,
    releases,
    runs,
    shapes,
    tmux,
)
from agent.call import Args, Call, Json, Roots
from agent.files import last_traceback, number, read_json, tail_lines, tail_objects, tree_bytes

ARGS: Args = {
    "run": (str, None, "run id; without it the newest"),
    "log_lines": (int, 10, "lines of the log's end"),
    "metrics_lines": (int, 200, "lines of the metrics' end"),
    "gpu_deadline_s": (float, gpu.DEADLINE_S, "seconds that nvidia-smi gets"),
}
RECENT_RUNS = 10
LINE_CHARS = 2000  # of one log line


def run(call: Call) -> dict[str, Any]:
    """The contract's snapshot. Damaged files count as missing; a named run that does not exist is refused."""
    roots, args = call.roots, call.args
    question = gpu.ask(roots.run, args["gpu_deadline_s"])
    marked = procs.marked()
    all_ids = runs.known(roots, marked)
    if args["run"] is not None and args["run"] not in all_ids:
        runs.require(roots, args["run"])
    chosen = args["run"] or (all_ids[0] if all_ids else None)
    facts: dict[str, Any] = {
        "now": time.time(),
        "booted": procs.booted(),
        "hostname": os.uname().nodename,
        "python": "{}.{}.{}".format(*sys.version_info),
        "release": {
            "current": releases.linked(roots, "current"),
            "previous": releases.linked(roots, "previous"),
            "count": len(releases.names(roots)),
        },
        "run": settled(lambda fresh: _run(roots, chosen, fresh, args), marked) if chosen else None,
        "runs": [_brief(roots, each, marked) for each in all_ids[:RECENT_RUNS]],
        "disks": disks(roots),
        "shm": disk("/dev/shm"),
        "lock": lock.owner(roots.run),
        "xids": kernel_log.xids(),
    }
    if chosen:
        facts["run"]["tmux"] = tmux.has_session(roots.run, chosen)  # once a look: it may take seconds
    facts["gpus"] = gpu.answer(question)
    ours = {proc.pid for found in marked.values() for proc in found}
    facts["stale"] = gpu.holders(roots.run, ours) if facts["gpus"]["status"] != "absent" else []
    return facts


def disk(path: str) -> dict[str, Any] | None:
    """Room on the file system that holds `path` or its nearest existing parent; None where there is none."""
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return {
        "path": path,
        "free_bytes": room.f_bavail * room.f_frsize,
        "total_bytes": room.f_blocks * room.f_frsize,
        "inodes_free": room.f_favail,
        "inodes_total": room.f_files,  # 0: this file system does not count them (btrfs)
    }


def disks(roots: Roots) -> list[dict[str, Any]]:
    """One row a file system that pctrun uses, under the first root that lies on it."""
    rows: dict[int, dict[str, Any]] = {}
    for path in roots:
        row = disk(path)
        if row:
            rows.setdefault(os.stat(row["path"]).st_dev, row)
    return list(rows.values())


def _run(
    roots: Roots, run_id: str, marked: dict[str, list[procs.Proc]], args: dict[str, Any]
) -> dict[str, Any]:
    path = runs.folder(roots, run_id)

    def read(name: str, shape: dict[str, Any]) -> Any:
        return shapes.sound(read_json(os.path.join(path, name)), shape)

    record, state = read("run.json", shapes.RECORD), read("state.json", shapes.STATE)
    lines = tail_objects(os.path.join(path, "metrics.jsonl"), args["metrics_lines"])
    metrics = [shapes.sound(line, shapes.METRICS) for line in lines]
    return {
        "id": run_id,
        "record": record,
        "state": state,
        "exit": read("exit.json", shapes.EXIT),
        "stop": read("stop.json", shapes.STOP),
        "attempts": read("attempts.json", shapes.ATTEMPTS),
        "notify": read("notify.json", shapes.NOTIFY),
        "metrics": [line for line in metrics if line.get("step") is not None],
        "checkpoints": checkpoints(path),
        "processes": processes(marked.get(path, []), state),
        "log": _log(path, args["log_lines"]),
        "baseline": baseline.best(path, record),
    }


def checkpoints(run_dir: str) -> list[dict[str, Any]]:
    """`{step, path, bytes, at}` of the whole ones, by step."""
    return [
        {"step": each.step, "path": each.path, "bytes": tree_bytes(each.path)[0], "at": each.at}
        for each in runs.checkpoints(run_dir)
    ]


def settled(look: Callable[[dict[str, list[procs.Proc]]], Json], marked: dict[str, list[procs.Proc]]) -> Json:
    """`look` (at a run's files and at its processes in `marked`), so that the two belong together.

    A trainer that started between the two is in the state and not among the processes, and would be called
    vanished: then both are looked at anew, until the state of before the second scan names the same one.
    """
    before = None
    while True:
        facts = look(marked)
        state = facts["state"] or {}
        if facts.get("exit") or state.get("pid") == before:
            return facts
        if any(proc["role"] == "trainer" for proc in facts["processes"]):
            return facts
        before, marked = state.get("pid"), procs.marked()


def processes(found: list[procs.Proc], state: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A run's processes with their roles: `{pid, role, state, rss_bytes, threads}`."""
    known = procs.roles(found, state)
    named = {known.supervisor: "supervisor", known.trainer: "trainer"}
    # also a copy of it that is about to become nvidia-smi
    named.update({proc: "notifier" for proc in found if procs.NOTIFIER in proc.argv})
    return [
        {
            "pid": proc.pid,
            "role": named.get(proc, "worker"),
            "state": proc.state,
            "rss_bytes": proc.rss_bytes,
            "threads": proc.threads,
        }
        for proc in found
    ]


def _log(run_dir: str, lines: int) -> dict[str, Any] | None:
    path = os.path.join(run_dir, "train.log")
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return {
        "path": path,
        "bytes": facts.st_size,
        "mtime": facts.st_mtime,
        "growth": logtimes.growth(run_dir, time.time()),
        "tail": [line[:LINE_CHARS] for line in tail_lines(path, lines)],
        "traceback": last_traceback(path),
    }


def _brief(roots: Roots, run_id: str, marked: dict[str, list[procs.Proc]]) -> dict[str, Any]:
    path = runs.folder(roots, run_id)
    record = read_json(os.path.join(path, "run.json")) or {}
    return {
        "id": run_id,
        "created": number(record, "created"),
        "alive": bool(marked.get(path)),
        "reason": (read_json(os.path.join(path, "exit.json")) or {}).get("reason"),
        "step": number(read_json(os.path.join(path, "state.json")), "step"),
    }
