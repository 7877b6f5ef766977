"""While nobody answers, a watch says what was seen last and how long ago, and goes on counting."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

from controller import progress
from controller.errors import Unreachable
from controller.verdict import Verdict, judge
from controller.watch_state import Seen
from controller.watch_view import View

_EVERY_S = 1.0
_FINE, _LEAVE = "the run may be fine", "Ctrl-C leaves"


def verdict(error: Unreachable, word: str, seen: Seen, age_s: float, left_s: float) -> Verdict:
    """As `status` has it. `word` is that of the last look, `age_s` ago; the next attempt is `left_s` away."""
    run, last = (seen.snapshot or {}).get("run"), None
    if run:
        last = {"word": word, "run": run["id"], "step": progress.of(run).step, "age_s": age_s}
    again = f"again in {left_s:.0f}s" if left_s >= 0.5 else "asking again"
    mend = f"{error.hint or _FINE}   |   {_LEAVE}"
    return judge(None, why=f"{error.message}; {again}", mend=mend, last=last)


def grown_old(seen: Seen, age_s: float) -> Seen:
    """What was seen, and every age in it as great as it is by now."""
    snapshot = seen.snapshot
    if snapshot is None:
        return seen
    return dataclasses.replace(seen, snapshot={**snapshot, "now": snapshot["now"] + age_s})


class Lost:
    """Shows it at once and every second, also while the next attempt waits for an answer."""

    def __init__(self, view: View, label: str) -> None:
        self._view, self._label = view, label
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, error: Unreachable, word: str, seen: Seen, pause_s: float) -> None:
        self.end()
        self._answered = answered = threading.Event()
        again_at = time.monotonic() + pause_s

        def draw() -> None:
            age_s, left_s = max(0.0, time.time() - seen.at), again_at - time.monotonic()
            now = verdict(error, word, seen, age_s, left_s)
            self._view.show(self._label, now, grown_old(seen, age_s))

        def work() -> None:
            with contextlib.suppress(OSError):  # nobody reads any more: the next look meets it, too
                while not answered.wait(_EVERY_S):
                    draw()

        draw()
        self._thread = threading.Thread(target=work, name="pctrun-lost", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Returns when nothing more is drawn."""
        self._answered.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
