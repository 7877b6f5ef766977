"""A step of minutes is a child whose words reach the operator as they come, and a file for whoever joins."""

from __future__ import annotations

import os
import select
import subprocess
import time

from agent import pip_said
from agent.call import Call, Refusal
from agent.files import tail_lines

TICK_S = 5.0  # a silent child is said to be at work so often
SHOWN = 160
KEPT_LINES = 20


def run(
    call: Call, what: str, argv: list[str], *, log: str, lock: int, env: dict[str, str], cwd: str = "/"
) -> str:
    """Run `argv`; what it said. A failure is an `environment` refusal with its last lines.

    The child holds `lock` as well: should the agent be killed, nobody builds in the same place beside it.
    Nothing is stopped when the reader leaves: notes go nowhere then, and the log has them.
    """
    began = time.monotonic()
    with open(log, "ab") as written:
        written.write(f"\n== {what}\n{' '.join(argv)}\n".encode())
        written.flush()
        start = written.tell()
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            pass_fds=(lock,),
        )
        assert child.stdout is not None
        last = ""
        while True:
            ready = select.select([child.stdout], [], [], TICK_S)[0]
            if ready:
                piece = os.read(child.stdout.fileno(), 1 << 16)
                if not piece:
                    break
                written.write(piece)
                written.flush()
                lines = [line.strip() for line in piece.decode("utf-8", "replace").splitlines()]
                last = next((line for line in reversed(lines) if line), last)
            passed = int(time.monotonic() - began)
            now = f": {_short(last)}" if last else ""
            call.frames.note(f"{what}, {passed} s{now}", passing=True)
        code = child.wait()
    with open(log, "rb") as file:
        file.seek(start)
        said = file.read().decode("utf-8", "replace")
    if code != 0:
        raise _failed(what, code, said, log)
    return said


def _short(line: str) -> str:
    """Without the file and line of the lock, which pip says behind every name."""
    return line.partition(" (from ")[0][:SHOWN]


def _failed(what: str, code: int, said: str, log: str) -> Refusal:
    if "No space left on device" in said:
        return Refusal("disk", f"{what}: no space left on the disk", "invoke env.prune, or more disk")
    known = pip_said.explain(said)
    if known is not None:
        return Refusal("environment", f"{what} failed: {known[0]}", known[1])
    lines = tail_lines(log, KEPT_LINES)
    reason = next((line for line in reversed(lines) if line.lower().startswith("error")), "")
    words = f"{what} failed: {reason[:300]}" if reason else f"{what} ended with {code}"
    return Refusal("environment", words, f"all it said: invoke exec 'cat {log}'", log=lines)
