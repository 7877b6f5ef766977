"""Read a run's log from where it is: bytes as they are, and a follow that goes on where a cut left it."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from controller import moments
from controller.call import Bytes, call
from controller.console import Console
from controller.errors import FINAL, ConnectionLost, NotRunning, Unreachable, Usage
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
    steps = [Step(f"read {wish.text}", "read", wish.args())]
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
    when the run has ended; a cut connection is made anew and goes on at the same byte. Where nothing was to
    be shown a note says so; the exit code is then 1 with `grep`, as grep's own.
    """
    wish = _Wish(run_id, lines, since, grep)
    kept: list[bytes] = []
    sink = kept.append if capture else write_stdout
    if follow:
        result = _follow(box, console, wish, sink)
    else:
        result = call(box, "read", wish.args(), on_note=console.agent_note, on_out=sink)
    document: dict[str, Any] = {
        key: result[key] for key in ("run", "offset", "bytes", "ended") if key in result
    }
    if capture:
        document["text"] = b"".join(kept).decode("utf-8", "replace")
    if not result["bytes"]:
        console.note(wish.missed(result["run"]))
    return Outcome(document, exit_code=int(bool(grep) and not result["bytes"]))


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
        part = self._part_of("the log", whole="all of the log")
        return f"the lines with '{self.grep}' in {part}" if self.grep else part

    def missed(self, run_id: str) -> str:
        """What is told where nothing was found."""
        log = f"{run_id}'s log"
        part = self._part_of(log, whole=log) if self.grep or self.since else log
        return f"nothing matches '{self.grep}' in {part}" if self.grep else f"no line in {part}"

    def _part_of(self, log: str, *, whole: str) -> str:
        if self.since:
            return f"{log} since {self._since}"
        last = "line" if self.lines == 1 else f"{self.lines} lines"
        return f"the last {last} of {log}" if self.lines else whole

    def args(self) -> dict[str, Any]:
        begin: dict[str, Any] = self.since or ({"lines": self.lines} if self.lines else {"offset": 0})
        return {"run": self.run_id or None, **begin, **self._sieve(), "follow": False}

    def follow_args(self, run_id: str | None, offset: int) -> dict[str, Any]:
        return {"run": run_id or None, "offset": offset, **self._sieve(), "follow": True}

    def _sieve(self) -> dict[str, Any]:
        return {"grep": self.grep} if self.grep else {}


def _follow(box: Box, console: Console, wish: _Wish, sink: Bytes) -> dict[str, Any]:
    """Read what was wished for, then what comes behind it, over as many connections as that takes.

    The agent says first where it begins: cut off before that, the wish itself is sent again. A box that was
    never reached is not waited for.
    """
    place = _Place(wish, console, sink)
    reached = False
    while True:
        here, place.dropping = place.at, place.beyond
        args = wish.args() if here is None else wish.follow_args(place.run_id, here)
        note = console.agent_note if here is None else place.heartbeat
        try:
            result = call(box, "read", args, on_note=note, on_part=place.told, on_out=place.take)
        except NotRunning:
            if here is not None:
                raise
            place.at = 0  # no log yet; no run at all is refused by the next call
            result = {}
        except Unreachable as error:
            reached = reached or isinstance(error, ConnectionLost)
            if isinstance(error, FINAL) or not reached:
                raise
            pause = RETRY_S[min(place.failures, len(RETRY_S) - 1)]
            place.failures += 1
            again = "reading again" if place.at is None else f"following again from byte {place.at}"
            console.note(f"{error.message}; {again} in {pause:g} s")
            time.sleep(pause)
            continue
        reached = True
        if here is not None:
            console.note(f"run {result['run']} has ended: invoke status")
        if here is not None or result.get("ended"):
            return {**result, "offset": place.begin, "bytes": place.sent}


class _Place:
    """Where in the log the reader is, so that a new connection neither repeats nor skips a byte.

    `at` is None until the agent has said where it begins. Without `grep` the bytes that arrive are those of
    the log. With it the agent says now and then how far it has judged; what came since then (`beyond`) comes
    again after a cut, and is dropped.
    """

    def __init__(self, wish: _Wish, console: Console, sink: Bytes) -> None:
        self.run_id: str | None = wish.run_id or None
        self.at: int | None = None
        self.begin = self.sent = self.beyond = self.dropping = 0
        self.failures = 0  # in a row, without a new byte between them
        self._console, self._sink, self._sieved = console, sink, bool(wish.grep)

    def told(self, part: dict[str, Any]) -> None:
        at = int(part["at"])
        if self.at is None:
            self.begin = at
        self.run_id = part.get("run") or self.run_id
        self.at, self.beyond = at, self.dropping  # what still comes again was shown, too

    def take(self, data: bytes) -> None:
        self.failures = 0
        drop = min(self.dropping, len(data))
        self.dropping -= drop
        fresh = data[drop:]
        if not fresh:
            return
        self._console.clear()
        self._sink(fresh)
        self.sent += len(fresh)
        if self._sieved:
            self.beyond += len(fresh)
        else:
            self.at = (self.at or 0) + len(fresh)

    def heartbeat(self, document: dict[str, Any]) -> None:
        self._console.progress(str(document.get("text") or ""), plain=False)


def write_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
