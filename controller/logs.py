"""Read a run's log from where it is: bytes as they are, and a follow that goes on where a cut left it."""

from __future__ import annotations

import sys
import time
from typing import Any

from controller.call import Bytes, call
from controller.console import Console
from controller.errors import NotRunning, Unreachable
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

RETRY_S = (1.0, 2.0, 5.0, 10.0)


def plan(box: Box, *, run_id: str = "", lines: int = 40, follow: bool = False, capture: bool = False) -> Plan:
    what = f"the last {lines} lines" if lines else "all"
    steps = [Step(f"read {what} of the log", "read", _tail_args(run_id, lines))]
    if follow:
        steps.append(Step("follow it from there until the run ends", "read", _follow_args(run_id, 0)))
    return Plan("logs", tuple(steps))


def run(
    box: Box,
    console: Console,
    *,
    run_id: str = "",
    lines: int = 40,
    follow: bool = False,
    capture: bool = False,
) -> Outcome:
    """Write the log to stdout as bytes, or with `capture` hand it back as text; `lines` 0 is all of it.

    `follow` ends when the run has ended; a cut connection is made anew and goes on at the same byte.
    """
    kept: list[bytes] = []
    sink = kept.append if capture else write_stdout
    try:
        result = call(box, "read", _tail_args(run_id, lines), on_note=console.agent_note, on_out=sink)
    except NotRunning:
        if not follow:
            raise
        result = {
            "run": run_id or None,
            "offset": 0,
            "bytes": 0,
        }  # no log yet; no run at all is refused below
    if follow and not result.get("ended"):
        result = _follow(box, console, result, sink)
    document: dict[str, Any] = {
        key: result[key] for key in ("run", "offset", "bytes", "ended") if key in result
    }
    if capture:
        document["text"] = b"".join(kept).decode("utf-8", "replace")
    return Outcome(document)


def _follow(box: Box, console: Console, tail: dict[str, Any], sink: Bytes) -> dict[str, Any]:
    """Go on behind `tail`. We count the bytes that arrive: a new connection neither repeats nor skips one."""
    at, failures = tail["offset"] + tail["bytes"], 0

    def take(data: bytes) -> None:
        nonlocal at, failures
        console.clear()
        sink(data)
        at += len(data)
        failures = 0

    def heartbeat(document: dict[str, Any]) -> None:
        console.progress(str(document.get("text") or ""), plain=False)

    while True:
        try:
            args = _follow_args(tail["run"], at)
            result = call(box, "read", args, on_note=heartbeat, on_out=take)
        except Unreachable as error:
            pause = RETRY_S[min(failures, len(RETRY_S) - 1)]
            failures += 1
            console.note(f"{error.message}; following again from byte {at} in {pause:g} s")
            time.sleep(pause)
            continue
        console.note(f"run {result['run']} has ended: invoke status")
        return {**result, "offset": tail["offset"], "bytes": at - tail["offset"]}


def _tail_args(run_id: str, lines: int) -> dict[str, Any]:
    begin: dict[str, Any] = {"lines": lines} if lines else {"offset": 0}
    return {"run": run_id or None, **begin, "follow": False}


def _follow_args(run_id: str | None, offset: int) -> dict[str, Any]:
    return {"run": run_id or None, "offset": offset, "follow": True}


def write_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
