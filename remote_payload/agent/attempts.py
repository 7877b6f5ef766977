"""A crash at three in the morning costs a back-off, not a night: the run goes on at its last checkpoint.

The supervisor tries again inside the run that crashed, with its own memory and marker, so nothing else can
start it twice. `attempts.json` tells whoever looks.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any, Callable, NamedTuple

from agent import procs, runs
from agent.call import Json
from agent.files import ATTEMPT, last_traceback, number, read_json, write_json

NAME = "attempts.json"
BACKOFF_S = 15.0  # the first pause; each is twice the one before
CEILING_S = 600.0
NEAR_STEPS = 2  # how far two ends of one failure may lie apart: threads run a row or two ahead of the step
LEFT_S = 10.0  # for SIGKILL to take effect on what the trainer left
_LEAST_ROOM = 1 << 20  # bytes free, below which a disk is full
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|MemoryError|Cannot allocate memory"
)
_VARIES = re.compile(r"0x[0-9a-f]+|\d+(?:[.:]\d+)*")  # numbers and addresses: no part of what failed


class Crash(NamedTuple):
    """`step`: the last finished one, None before the first state. `failure`: what equal failures share."""

    step: int | None
    says: str
    failure: str
    text: str  # the exception, or the end of the log: what is looked through for a cause


def why_not(crash: Crash, before: list[Crash], end: Json, limit: int, free_bytes: float) -> str:
    """Why this crash is not tried again, as the end of a sentence for a person; empty when it is."""
    if end.get("code") == 2:
        return "the trainer refused to go on, and would again"
    if _FULL.search(crash.text) or free_bytes < _LEAST_ROOM:
        return "the disk was full"
    if crash.step is None and not before:
        return "it died before its first state"
    same = [each for each in before if each.failure == crash.failure]
    if any(_near(each.step, crash.step) for each in same):
        where = f"at step {crash.step}" if crash.step is not None else "before its first state"
        return f"the same failure {where} for the second time"
    if _MEMORY.search(crash.text) and any(_MEMORY.search(each.text) for each in before):
        return "memory did not suffice for the second time"
    if len(before) >= limit:
        return "no restart is left"
    return ""


def _near(one: int | None, other: int | None) -> bool:
    return one == other if one is None or other is None else abs(one - other) <= NEAR_STEPS


def pause_s(number_of_crash: int, first_s: float) -> float:
    """Seconds before the restart after the run's nth crash."""
    return min(CEILING_S, first_s * 2.0 ** (number_of_crash - 1))


class Attempts:
    """One run's crashes and what follows from them. Without `auto_restart` in its record: nothing."""

    def __init__(self, run_dir: str, record: Json) -> None:
        wish = record.get("auto_restart") or {}
        self.run_dir = run_dir
        self.limit = int(number(wish, "limit") or 0)
        self.first_s = BACKOFF_S if number(wish, "backoff_s") is None else float(wish["backoff_s"])
        self._crashes: list[Crash] = []
        self._told: list[Json] = []

    def after(self, end: Json, pid: int) -> float | None:
        """Seconds until the next attempt, or None when `end` is the run's end. `pid`: the trainer's."""
        wished = os.path.exists(os.path.join(self.run_dir, "stop.json"))
        if not self.limit or end["reason"] != "crashed" or wished:
            return None
        crash = _look_at(self.run_dir, end, pid)
        reason = why_not(crash, self._crashes, end, self.limit, _free(self.run_dir))
        self._crashes.append(crash)
        pause = pause_s(len(self._crashes), self.first_s)
        self._told.append(
            {
                "at": time.time(),
                "step": crash.step,
                **{key: end.get(key) for key in ("code", "signal")},
                "says": crash.says,
                "failure": crash.failure,
                "again_at": None if reason else time.time() + pause,
                "resume": None,
            }
        )
        try:
            self._write(reason)
        except OSError:  # a disk that takes no record takes no training
            return None
        return None if reason else pause

    def wait(self, seconds: float, meanwhile: Callable[[], None]) -> bool:
        """Let the pause pass; False as soon as an operator stops the run."""
        ends = time.monotonic() + seconds
        while True:
            if os.path.exists(os.path.join(self.run_dir, "stop.json")):
                return False
            if time.monotonic() >= ends:
                return True
            meanwhile()

    def begin(self) -> tuple[list[str], str]:
        """What the next attempt's trainer is told beyond the record's argv, and the line for the log."""
        own = runs.checkpoints(self.run_dir)
        last = self._told[-1]
        if own:
            last["resume"] = {"step": own[-1].step, "path": own[-1].path}
        try:
            self._write("", restarted=len(self._told))
        except OSError:
            pass  # the trainer will say more of a full disk than we could
        where = f"at the checkpoint of step {own[-1].step}" if own else "where this run began"
        head = f"{ATTEMPT}{len(self._told) + 1} of {self.limit + 1} begins {where}"
        return (["--resume", own[-1].path] if own else []), head

    def _write(self, given_up: str, restarted: int | None = None) -> None:
        facts = {
            "schema": 1,
            "limit": self.limit,
            "restarted": len(self._told) - 1 if restarted is None else restarted,
            "given_up": given_up or None,
            "crashes": self._told,
        }
        write_json(os.path.join(self.run_dir, NAME), facts)


def end_leftovers(run_dir: str) -> None:
    """SIGKILL what a dead trainer left in the run's scope: it may hold GPU memory, or the lock of its files.

    The notifier stays: it is the run's, not the attempt's.
    """
    ends = time.monotonic() + LEFT_S
    while time.monotonic() < ends:
        found = procs.roles(procs.scope(run_dir), None)
        left = [*found.workers, *([found.trainer] if found.trainer else [])]
        if not left:
            return
        for proc in left:
            procs.send(proc, signal.SIGKILL)
        time.sleep(0.05)


def _look_at(run_dir: str, end: Json, pid: int) -> Crash:
    state: dict[str, Any] = read_json(os.path.join(run_dir, "state.json")) or {}
    step = number(state, "step") if state.get("pid") == pid else None
    block = last_traceback(os.path.join(run_dir, "train.log"))
    says = str(end.get("detail") or "")
    failure = f"{end.get('signal') or end.get('code')} {_VARIES.sub('#', says)}"
    return Crash(None if step is None else int(step), says, failure, "\n".join((says, *block)))


def _free(run_dir: str) -> float:
    try:
        room = os.statvfs(run_dir)
    except OSError:
        return 0.0
    return room.f_bavail * room.f_frsize
