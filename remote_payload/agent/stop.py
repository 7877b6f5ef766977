"""A stop loses nothing it need not lose, ends exactly the run's own processes, and tells what it did."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time

from agent import gpu, lock, procs, runs
from agent.call import Args, Call, Json, Roots
from agent.files import number, read_json, tail_objects, write_json

ARGS: Args = {
    "run": (str, None, "run id; without it the one that is alive, else the newest"),
    "grace_s": (
        float,
        None,
        "seconds for the trainer's checkpoint; without it what the run was started with",
    ),
    "gpu_wait_s": (float, 30.0, "seconds for the GPUs' memory to come back"),
    "reason": (str, "", "why, for the record"),
}
SUPERVISOR_S = 5.0  # for the supervisor to write exit.json by itself after the trainer's end
KILL_S = 10.0  # for SIGKILL to take effect; state D can hold it off for longer
IDLE_MIB = 1024  # a GPU with less in use counts as given back: contexts of the driver itself stay below
_DOING = {
    "training": "finishing one more",
    "checkpointing": "writing a checkpoint",
    "evaluating": "evaluating",
    "stopped": "the trainer is about to be gone",
}


def run(call: Call) -> Json:
    with lock.hold(call):
        return stop(call)


def stop(call: Call) -> Json:
    """The contract's `stop`; the caller holds the lock. Goes on to its end also without a reader."""
    roots, args = call.roots, call.args
    run_id = _choose(roots, args["run"])
    if run_id is None or not procs.scope(runs.folder(roots, run_id)):
        return {"outcome": "nothing-to-stop", "run": run_id, **_progress(roots, run_id), **_nothing()}
    run_dir = runs.folder(roots, run_id)
    began = time.monotonic()
    record = read_json(os.path.join(run_dir, "run.json"))
    grace = args["grace_s"]
    if grace is None:
        kept = number(record, "grace_s")
        grace = runs.DEFAULT_GRACE_S if kept is None else kept
    wish = {"at": time.time(), "operator": call.operator, "reason": args["reason"]}
    try:
        write_json(os.path.join(run_dir, "stop.json"), wish)
    except OSError as error:  # a full disk, a folder that was deleted: no reason to let the run go on
        call.frames.note(f"{run_id} is stopped without a record of it: {error.strerror}")
    before = _memory(roots) if _holds_gpu(run_dir) else None
    if before == {}:
        call.frames.note("nvidia-smi does not tell the GPUs' memory: whether it comes back stays unknown")
    in_time = _ask(call, run_dir, grace)
    killed, survivors = _end_scope(call, run_dir)
    waited = time.monotonic() - began
    if not survivors and not os.path.exists(os.path.join(run_dir, "exit.json")):
        facts = {
            "code": None,
            "signal": None,
            "reason": "stopped",
            "detail": "its supervisor was already gone",
        }
        with contextlib.suppress(OSError):
            runs.write_exit(run_dir, facts)
    return {
        "outcome": "stopped" if in_time else "killed",
        "run": run_id,
        **_progress(roots, run_id),
        "waited_s": round(waited, 3),
        "killed": killed,
        "gpus": _await_memory(call, before or {}),
        "survivors": survivors,
    }


def _choose(roots: Roots, given: str | None) -> str | None:
    marked = procs.marked()
    known = runs.known(roots, marked)
    if given is not None:
        if given not in known:
            runs.require(roots, given)
        return given
    alive = [run_id for run_id in known if runs.folder(roots, run_id) in marked]
    return next(iter(alive + known), None)


def _nothing() -> Json:
    return {"waited_s": 0.0, "killed": [], "gpus": [], "survivors": []}


def _progress(roots: Roots, run_id: str | None) -> Json:
    """Last finished step, the checkpoint to go on from, and the steps between the two."""
    if run_id is None:
        return {"step": None, "checkpoint": None, "lost_steps": 0}
    point = runs.resume_point(roots, run_id)
    saved = point["step"] if point else 0
    last = [
        number(line, "step")
        for line in tail_objects(os.path.join(runs.folder(roots, run_id), "metrics.jsonl"), 5)
    ]
    step = int(max((each for each in last if each is not None), default=saved))
    checkpoint = {"step": point["step"], "path": point["path"]} if point else None
    return {"step": step, "checkpoint": checkpoint, "lost_steps": max(0, step - saved)}


def _ask(call: Call, run_dir: str, grace: float) -> bool:
    """SIGTERM to the trainer and wait for its end; False when the grace is over.

    A supervisor without a trainer may be about to start one: it gets a moment, no more.
    """
    began, told = time.monotonic(), -1.0
    asked: set[int] = set()
    while True:
        state = read_json(os.path.join(run_dir, "state.json"))
        found = procs.roles(procs.scope(run_dir), state)
        waited = time.monotonic() - began
        if found.trainer is None:
            ended = os.path.exists(os.path.join(run_dir, "exit.json"))
            if asked or ended or found.supervisor is None or waited > 1:
                return True
        elif waited > grace:
            call.frames.note(f"the trainer did not end in {grace:g} s: it is killed")
            return False
        elif found.trainer.pid not in asked:
            asked.add(found.trainer.pid)
            procs.send(found.trainer, signal.SIGTERM)
            procs.send(found.trainer, signal.SIGCONT)  # a stopped process would never see it
        if waited - told >= 1:
            told = waited
            phase = str((state or {}).get("phase", "starting"))
            at = f"after step {state.get('step')}: {_DOING.get(phase, phase)}" if state else "no state yet"
            call.frames.note(f"{at}, {waited:.0f} s of {grace:g} s", passing=True)
        time.sleep(0.05)


def _end_scope(call: Call, run_dir: str) -> tuple[list[Json], list[Json]]:
    """SIGKILL what is left, the supervisor last, until two looks find nothing; (killed, survivors)."""
    killed: dict[int, Json] = {}
    began, alone_since, empty = time.monotonic(), None, 0
    while True:
        found = procs.roles(procs.scope(run_dir), read_json(os.path.join(run_dir, "state.json")))
        now = time.monotonic()
        rest = found.workers + ([found.trainer] if found.trainer else [])
        last = [each for each in (found.notifier, found.supervisor) if each]
        if not rest and last:
            alone_since = alone_since or now
            if now - alone_since > SUPERVISOR_S:
                rest = last
        for proc in rest:
            if procs.send(proc, signal.SIGKILL) and proc.pid not in killed:
                killed[proc.pid] = {"pid": proc.pid, "command": proc.command}
                call.frames.note(f"killed {proc.pid} ({proc.command:.60})")
        # a process in the middle of exec shows an empty environment for a moment: look twice
        empty = empty + 1 if not rest and not last else 0
        if empty == 2:
            return list(killed.values()), []
        if now - began > KILL_S + SUPERVISOR_S:
            left = [{"pid": proc.pid, "command": proc.command, "state": proc.state} for proc in rest]
            return [each for each in killed.values() if all(each["pid"] != one["pid"] for one in left)], left
        time.sleep(0.05)


def _holds_gpu(run_dir: str) -> bool:
    if not glob.glob(gpu.DEVICES + "[0-9]*"):
        return False
    holders = procs.device_holders()
    return any(proc.pid in holders for proc in procs.scope(run_dir))


def _memory(roots: Roots) -> dict[int, int]:
    """MiB in use by GPU; empty when nvidia-smi has no answer."""
    rows = gpu.query(roots.run)["rows"]
    return {row["index"]: row["memory_used_mib"] for row in rows if row["memory_used_mib"] is not None}


def _await_memory(call: Call, before: dict[int, int]) -> list[Json]:
    """Wait until each GPU is below IDLE_MIB; one that stays full is reported with who holds the devices.

    `back` is None where nvidia-smi tells it no more. That is not waited for: a driver that hangs or has lost
    a card stays so.
    """
    if not before:
        return []
    began = time.monotonic()
    while True:
        after = _memory(call.roots)
        full = [index for index in before if after.get(index, 0) >= IDLE_MIB]
        waited = time.monotonic() - began
        if not full or waited > call.args["gpu_wait_s"]:
            break
        numbers = ", ".join(map(str, full))
        call.frames.note(f"GPU {numbers}: memory not back yet, {waited:.0f} s", passing=True)
        time.sleep(0.5)
    holders = gpu.holders(call.roots.run, set()) if full else []
    return [
        {
            "index": index,
            "used_mib_before": used,
            "used_mib": after.get(index),
            "back": index not in full if index in after else None,
            "holders": holders if index in full else [],
        }
        for index, used in before.items()
    ]
