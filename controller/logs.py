"""Read a run's log from where it is: bytes as they are, and a follow that goes on where a cut left it."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from controller import moments
from controller.call import Bytes, call
from controller.console import Console
from controller.errors import FINAL, NotRunning, Unreachable, Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

LINES = 40
RETRY_S = (1.0, 2.0, 5.0, 10.0)


def plan(
    box: Box,
    *,
    run_id: str = "",
    lines: int | None = None,
    since: str = "",
    grep: str = "",
    follow: bool = False,
    capture: bool = False,
) -> Plan:
    wish = _Wish(run_id, lines, since, grep)
    steps = [Step(f"read {wish.text} of the log", "read", wish.args())]
    if follow:
        steps.append(Step("follow it from there until the run ends", "read", wish.follow_args(run_id, 0)))
    return Plan("logs", tuple(steps))


def run(
    box: Box,
    console: Console,
    *,
    run_id: str = "",
    lines: int | None = None,
    since: str = "",
    grep: str = "",
    follow: bool = False,
    capture: bool = False,
) -> Outcome:
    """Write the log to stdout as bytes, or with `capture` hand it back as text.

    `lines` 0 is all of it; None is 40, or all when `since` (`10m`, `14:10`) or `grep` chooses. `follow` ends
    when the run has ended; a cut connection is made anew and goes on at the same byte.
    """
    wish = _Wish(run_id, lines, since, grep)
    kept: list[bytes] = []
    sink = kept.append if capture else write_stdout
    try:
        result = call(box, "read", wish.args(), on_note=console.agent_note, on_out=sink)
    except NotRunning:
        if not follow:
            raise
        # no log yet; no run at all is refused below
        result = {"run": run_id or None, "offset": 0, "bytes": 0, "at": 0}
    if follow and not result.get("ended"):
        result = _follow(box, console, wish, result, sink)
    document: dict[str, Any] = {
        key: result[key] for key in ("run", "offset", "bytes", "ended") if key in result
    }
    if capture:
        document["text"] = b"".join(kept).decode("utf-8", "replace")
    return Outcome(document)


class _Wish:
    """Which lines of which log; checked before anything is sent."""

    def __init__(self, run_id: str, lines: int | None, since: str, grep: str) -> None:
        self.run_id, self.grep = run_id, grep
        self.since, self._since = (moments.since(since) if since else {}), since
        self.lines = (0 if since or grep else LINES) if lines is None else lines
        if since and lines:
            raise Usage("--since and --lines both say where to begin", "give one of them")
        try:
            re.compile(grep.encode())
        except (re.error, OverflowError) as error:
            raise Usage(
                f"--grep '{grep}' is no regular expression: {error}", "a \\ before ( [ * + means it"
            ) from None

    @property
    def text(self) -> str:
        what = f"all since {self._since}" if self.since else f"the last {self.lines} lines"
        shown = what if self.since or self.lines else "all"
        return f"the lines with '{self.grep}' in {shown}" if self.grep else shown

    def args(self) -> dict[str, Any]:
        begin: dict[str, Any] = self.since or ({"lines": self.lines} if self.lines else {"offset": 0})
        return {"run": self.run_id or None, **begin, **self._sieve(), "follow": False}

    def follow_args(self, run_id: str | None, offset: int) -> dict[str, Any]:
        return {"run": run_id or None, "offset": offset, **self._sieve(), "follow": True}

    def _sieve(self) -> dict[str, Any]:
        return {"grep": self.grep} if self.grep else {}


def _follow(box: Box, console: Console, wish: _Wish, tail: dict[str, Any], sink: Bytes) -> dict[str, Any]:
    """Go on behind `tail`, so that a new connection neither repeats nor skips a byte.

    Without `grep` the bytes that arrive are those of the log. With it the agent says now and then how far it
    has judged; what came since then comes again after a cut, and is dropped.
    """
    at, beyond, dropping, sent, failures = int(tail["at"]), 0, 0, 0, 0

    def take(data: bytes) -> None:
        nonlocal at, beyond, dropping, sent, failures
        failures = 0
        drop = min(dropping, len(data))
        dropping -= drop
        fresh = data[drop:]
        if not fresh:
            return
        console.clear()
        sink(fresh)
        sent += len(fresh)
        if wish.grep:
            beyond += len(fresh)
        else:
            at += len(fresh)

    def judged(part: dict[str, Any]) -> None:
        nonlocal at, beyond
        at, beyond = int(part["at"]), dropping  # what still comes again was shown, too

    def heartbeat(document: dict[str, Any]) -> None:
        console.progress(str(document.get("text") or ""), plain=False)

    while True:
        dropping = beyond
        try:
            args = wish.follow_args(tail["run"], at)
            result = call(box, "read", args, on_note=heartbeat, on_part=judged, on_out=take)
        except Unreachable as error:
            if isinstance(error, FINAL):
                raise
            pause = RETRY_S[min(failures, len(RETRY_S) - 1)]
            failures += 1
            console.note(f"{error.message}; following again from byte {at} in {pause:g} s")
            time.sleep(pause)
            continue
        console.note(f"run {result['run']} has ended: invoke status")
        return {**result, "offset": tail["offset"], "bytes": tail["bytes"] + sent}


def write_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
