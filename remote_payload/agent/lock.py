"""Two operators must not change one container at once, and a killed agent must not leave it locked.

The kernel drops a flock with its holder; the JSON in the file only says who that is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from typing import Any, Callable, Iterator

from agent.call import Call, Refusal
from agent.files import read_json

LOOK_S = 1.0  # a look holds the lock for microseconds, or until a busy machine lets it go on


@contextlib.contextmanager
def hold(
    call: Call, name: str = "lock", waiting: Callable[[dict[str, Any]], None] | None = None
) -> Iterator[int]:
    """Hold `<run>/NAME` for one changing verb; refuses with `locked`, naming the owner and the age.

    With `waiting` it does not refuse: that is called with the owner while the lock is another's. Yields the
    descriptor: a child that inherits it holds the lock, too.
    """
    os.makedirs(call.roots.run, exist_ok=True)
    path = os.path.join(call.roots.run, name)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _take(handle):
            if waiting is None:
                raise _locked(path)
            waiting(read_json(path) or {})
        owner = {"operator": call.operator, "verb": call.verb, "since": time.time(), "pid": os.getpid()}
        _write(handle, json.dumps(owner).encode() + b"\n")
        yield handle
        _write(handle, b"")
    finally:
        os.close(handle)


def _take(handle: int) -> bool:
    """Take the lock, past the moment for which another agent's look (`owner`) may hold it."""
    deadline = time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def owner(run_root: str, name: str = "lock") -> dict[str, Any] | None:
    """Who holds the lock now, or None; waits for nothing."""
    path = os.path.join(run_root, name)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return read_json(path) or {"operator": {}, "verb": "", "since": None, "pid": None}
    finally:
        os.close(handle)
    return None


def _write(handle: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock still locks; it only cannot say for whom
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)


def _locked(path: str) -> Refusal:
    holder = read_json(path) or {}
    who = holder.get("operator") or {}
    name = f"{who.get('user', 'somebody')}@{who.get('host', 'somewhere')}"
    since = holder.get("since")
    age = f" for {max(0, int(time.time() - since))} s" if isinstance(since, (int, float)) else ""
    return Refusal(
        "locked",
        f"{name} holds this box{age} with {holder.get('verb', 'a change')} (pid {holder.get('pid', '?')})",
        "wait until it has ended; invoke unlock ends it if it hangs",
        owner=holder,
    )
