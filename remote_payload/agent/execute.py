"""A person's ad-hoc look: one argument list, no shell, nothing left running when the reader leaves."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from typing import IO, Any

from agent import procs
from agent.call import Args, Call, Refusal
from agent.frames import ReaderGone

ARGS: Args = {
    "argv": (list, None, "the program and its arguments"),
    "cwd": (str, None, "folder to start in; without it the agent's"),
    "stdin": (bool, False, "stream our stdin to it; otherwise it reads nothing"),
    "timeout_s": (float, None, "seconds until it is ended; without it none"),
}
CHUNK = 256 * 1024
TERM_GRACE_S = 5.0
DRAIN = 2 << 20  # bytes: what two full pipes of the largest usual size can hold when the child has ended


def run(call: Call) -> dict[str, Any]:
    """Run `argv`, its output as frames; `{code, signal}`. Past `timeout_s` its group gets TERM, then KILL."""
    argv = call.args["argv"]
    if not argv or not all(isinstance(word, str) and "\0" not in word for word in argv):
        raise Refusal("usage", "exec needs argv: a list of texts that begins with the program")
    child = _spawn(argv, call.args["cwd"], call.args["stdin"])
    if child.stdin is not None:
        threading.Thread(target=_feed, args=(call.stdin, child.stdin), daemon=True).start()
    limit = call.args["timeout_s"]
    try:
        in_time = _pump(call, child, None if limit is None else time.monotonic() + limit)
    except ReaderGone:
        _end_group(child, grace_s=0)
        raise
    if not in_time:
        _end_group(child, TERM_GRACE_S)
        raise Refusal(
            "usage", f"{argv[0]} did not end in {limit:g} s and was stopped", "more time: --timeout SECONDS"
        )
    code = child.wait()
    if code < 0:
        return {"code": 128 - code, "signal": procs.signal_name(-code)}
    return {"code": code, "signal": None}


def _spawn(argv: list[str], cwd: str | None, with_stdin: bool) -> subprocess.Popen[bytes]:
    if cwd is not None and not os.path.isdir(cwd):
        raise Refusal("usage", f"no folder {cwd} to start in")
    try:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            stdin=subprocess.PIPE if with_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise Refusal(
            "usage", f"command not found: {argv[0]}", "give a full path, or one that PATH finds"
        ) from None
    except PermissionError:
        raise Refusal("usage", f"not executable: {argv[0]}") from None
    except OSError as error:
        raise Refusal("usage", f"cannot start {argv[0]}: {error.strerror}") from None
    except UnicodeEncodeError:
        raise Refusal("usage", "exec: argv holds a lone surrogate, which no argument can carry") from None


def _feed(source: IO[bytes], pipe: IO[bytes]) -> None:
    """Our stdin to the child's, until either side closes."""
    with contextlib.suppress(OSError), pipe:
        while True:
            block = source.read1(CHUNK)  # type: ignore[attr-defined]
            if not block:
                return
            view = memoryview(block)
            while view:
                view = view[pipe.write(view) :]


def _pump(call: Call, child: subprocess.Popen[bytes], deadline: float | None) -> bool:
    """Forward output until the child has ended and its pipes are drained; False at the deadline.

    A background grandchild may keep the pipes open for ever: the end of the child is the end of the wait.
    """
    assert child.stdout is not None and child.stderr is not None
    left = DRAIN
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, call.frames.out)
        selector.register(child.stderr, selectors.EVENT_READ, call.frames.err)
        while selector.get_map():
            ended = child.poll() is not None
            ready = selector.select(0 if ended else 0.1)
            for key, _ in ready:
                block = os.read(key.fd, CHUNK)
                if block:
                    key.data(block)
                else:
                    selector.unregister(key.fileobj)
                left -= len(block) if ended else 0
            if ended and (not ready or left <= 0):
                return True
            if call.frames.gone():
                raise ReaderGone
            if deadline is not None and not ended and time.monotonic() > deadline:
                return False
    while child.poll() is None:  # it has closed its output but still works
        if call.frames.gone():
            raise ReaderGone
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _end_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """End our child's group. The leader is not reaped before: the group's number cannot have passed on."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if grace_s:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
