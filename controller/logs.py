"""Read a run's log from where it is: bytes as they are, and a follow that goes on where a cut left it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from controller import links
from controller.call import call
from controller.console import Console
from controller.errors import Unreachable
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

RETRY_S = (1.0, 2.0, 5.0, 10.0)


class _Reader:
    """Where we are in which run's log: what a reconnect needs to neither repeat nor skip a byte."""

    def __init__(self, run_id: str, lines: int, sink: Callable[[bytes], None]) -> None:
        self.run_id = run_id
        self.lines = lines
        self.offset: int | None = None
        self.sink = sink

    def args(self, follow: bool) -> dict[str, Any]:
        return {
            "run": self.run_id or None,
            "lines": self.lines if self.offset is None else None,
            "offset": self.offset,
            "follow": follow,
        }

    def note(self, document: dict[str, Any]) -> None:
        """The first note names the run and the byte at which its output begins."""
        if "offset" in document:
            self.run_id, self.offset = str(document["run"]), int(document["offset"])

    def take(self, data: bytes) -> None:
        self.sink(data)
        if self.offset is not None:
            self.offset += len(data)


def plan(box: Box, *, run_id: str = "", lines: int = 40, follow: bool = False, capture: bool = False) -> Plan:
    text = "follow the log" if follow else f"read the last {lines} lines of the log"
    args = _Reader(run_id, lines, lambda data: None).args(follow)
    return Plan("logs", (Step(text, "read", args),))


def run(
    box: Box,
    console: Console,
    *,
    run_id: str = "",
    lines: int = 40,
    follow: bool = False,
    capture: bool = False,
) -> Outcome:
    """Write the log to stdout as bytes, or with `capture` hand it back as text.

    `follow` ends when the run has ended; a cut connection is made anew at the same byte.
    """
    kept: list[bytes] = []
    reader = _Reader(run_id, lines, kept.append if capture else write_stdout)
    attempt = 0
    while True:
        before = reader.offset
        try:
            result = call(box, "read", reader.args(follow), on_note=reader.note, on_out=reader.take)
            break
        except Unreachable as error:
            if not follow or reader.offset is None:
                raise
            attempt = 0 if reader.offset != before else attempt
            console.note(f"{error.message}; following again from byte {reader.offset}")
            time.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
            links.drop(box)
    document = dict(result)
    if capture:
        document["text"] = b"".join(kept).decode("utf-8", "replace")
    return Outcome(document)


def write_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
