"""Block until a run is what a script needs it to be, or until it can no longer become that."""

from __future__ import annotations

import time
from typing import Any

from controller import render, status
from controller.console import Console
from controller.deadline import Deadline
from controller.errors import FINAL, NotRunning, Unreachable, Usage, WaitTimedOut
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step
from controller.verdict import EXIT_CODES, Verdict
from controller.watch_looks import Looks

TERMINAL = frozenset({"finished", "stopped", "crashed", "not-running"})
EVERY_S, LEAST_S = 2.0, 0.2  # between two looks over one `pct exec`, which cost the host nothing
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 10.0  # a new `pct exec` costs it 0.6 s of CPU
_ANSWER_S = 60.0  # that one look may take beyond the timeout: a container may be suspended meanwhile


def plan(box: Box, *, until: str = "healthy", timeout_s: float = 600.0, run_id: str = "") -> Plan:
    _words(until)
    text = f"look every {EVERY_S:g} s until the verdict is {until}, at most {timeout_s:g} s"
    return Plan("wait", (Step(text, "watch", _args(run_id, timeout_s)),))


def run(
    box: Box, console: Console, *, until: str = "healthy", timeout_s: float = 600.0, run_id: str = ""
) -> Outcome:
    """Exit code 0 once the verdict is `until`, or one of several with commas between; the verdict's own code
    when the run ended otherwise.

    Raises WaitTimedOut. An unreachable box is waited for: it may come back.
    """
    looks, wait = Looks(box), _Wait(box, console, until, timeout_s, follows=not run_id)
    pause = FIRST_RETRY_S

    def show(part: dict[str, Any]) -> None:
        nonlocal pause
        pause = FIRST_RETRY_S
        wait.consider(looks.take(part), looks.seen.snapshot)

    try:
        while True:
            deadline = Deadline(total=wait.left_s + _ANSWER_S)
            try:
                looks.follow(_args(run_id, wait.left_s), show, deadline=deadline)
            except (Unreachable, NotRunning) as error:
                if isinstance(error, FINAL):
                    raise
                wait.consider(status.unseen(box, error), None)
            time.sleep(min(pause, wait.left_s))
            pause = min(LAST_RETRY_S, pause * 1.3)
    except _Over as over:
        return over.outcome


class _Over(Exception):
    """It is over; leaves the open look, which would go on."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


class _Wait:
    """What is waited for, and how long it has been. `follows`: a run that takes this one's place, too."""

    def __init__(self, box: Box, console: Console, until: str, timeout_s: float, *, follows: bool) -> None:
        self.box, self.console, self.until, self.timeout_s = box, console, until, timeout_s
        self.words, self._follows = _words(until), follows
        self._began = time.monotonic()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return max(0.0, self.timeout_s - self.waited_s)

    def consider(self, verdict: Verdict, snapshot: dict[str, Any] | None) -> None:
        """Raises _Over with an answer, WaitTimedOut without one."""
        line = render.one_line(self.box.label, verdict, snapshot)
        if verdict.word in self.words or (verdict.word in TERMINAL and not self._goes_on(snapshot)):
            self.console.clear()
            code = 0 if verdict.word in self.words else verdict.exit_code
            document = {**verdict.as_json(), "until": self.until, "waited_s": round(self.waited_s, 3)}
            evidence = "".join(f"\n  | {text}" for text in verdict.evidence[-8:])
            raise _Over(Outcome(document, line + evidence, code, verdict.word))
        if not self.left_s:
            self.console.clear()
            raise WaitTimedOut(
                f"{self.box.label} is not {self.until} after {self.timeout_s:g} s: {line}",
                verdict.mend or _onward(verdict.word),
                evidence=verdict.reasons,
            )
        self.console.progress(line)

    def _goes_on(self, snapshot: dict[str, Any] | None) -> bool:
        """Whether a start is under way, whose run would be the one to wait for."""
        lock = (snapshot or {}).get("lock") or {}
        return self._follows and lock.get("verb") in ("start", "restart")


def _args(run_id: str, left_s: float) -> dict[str, Any]:
    """`left_s`: a short wait looks more often, so as not to be late."""
    return {
        "run": run_id or None,
        "interval_s": max(LEAST_S, min(EVERY_S, left_s)),
        "log_lines": 8,
        "points": 0,
        "gpu_deadline_s": status.GPU_DEADLINE_S,
    }


def _onward(word: str) -> str:
    goes_on = word in ("starting", "warming-up", "healthy")
    return "the run goes on: the same command waits on" if goes_on else "invoke status"


def _words(until: str) -> list[str]:
    found = [word.strip() for word in until.split(",")]
    for word in found:
        if word not in EXIT_CODES:
            raise Usage(f"no verdict is called '{word}'", f"one of: {', '.join(EXIT_CODES)}")
    return found
