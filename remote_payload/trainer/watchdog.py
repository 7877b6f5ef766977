"""A hang says nothing by itself: name the threads that have not moved, and put their stacks into the log."""

from __future__ import annotations

import faulthandler
import io
import sys
import threading
import time
import traceback

from trainer.clock import DONE, REPORTING, WAITING, Clock

FLOOR_S, FACTOR = 120.0, 20.0  # later than `status` calls the run stalled, so that the log then shows why


class Watchdog:
    """Looks at the pipeline's clocks from the main thread; tells once for each hang."""

    def __init__(self, clocks: dict[str, Clock]) -> None:
        self._clocks = clocks
        self._told_of: frozenset[str] = frozenset()

    def look(self, step_s: float) -> str | None:
        """The report of a new hang: no thread has moved for max(FLOOR_S, FACTOR x the step's seconds).

        One moving thread means that work goes on; threads that only wait follow the one that they wait for.
        """
        limit = max(FLOOR_S, FACTOR * step_s)
        _arm(limit * 1.5)
        now = time.monotonic()
        if any(clock.doing == REPORTING for clock in self._clocks.values()):
            return None  # an evaluation takes as long as it takes; `status` has a limit of its own for it
        still = {name: clock for name, clock in self._clocks.items() if now - clock.since > limit}
        if len(still) < len(self._clocks):
            self._told_of = frozenset()
            return None
        if self._told_of == frozenset(still):
            return None
        self._told_of = frozenset(still)
        return _report(still, now)

    def rest(self) -> None:
        """Stop looking."""
        faulthandler.cancel_dump_traceback_later()


def _report(still: dict[str, Clock], now: float) -> str:
    culprits = [name for name, clock in still.items() if not clock.doing.startswith((WAITING, DONE))]
    lines = [f"no thread has moved for {min(now - clock.since for clock in still.values()):.0f} s:"]
    for name in culprits or list(still):
        lines.append(f"  {name}: {still[name].doing}, for {now - still[name].since:.0f} s")
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name in (culprits or still) and thread.ident in frames:
            lines.append(f"stack of {thread.name}, innermost call last:")
            lines += [part.rstrip() for part in traceback.format_stack(frames[thread.ident])]
    return "\n".join(lines)


def _arm(seconds: float) -> None:
    """A timer in C prints all stacks should this look not come again: some thread then keeps the interpreter
    lock and no Python code can say so."""
    try:
        faulthandler.dump_traceback_later(seconds)
    except (AttributeError, ValueError, io.UnsupportedOperation):
        pass  # stderr is no file here
