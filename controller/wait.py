"""Block until a run is what a script needs it to be, or until it can no longer become that."""

from __future__ import annotations

import time

from controller import render, status
from controller.console import Console
from controller.errors import Usage, WaitTimedOut
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step
from controller.verdict import EXIT_CODES

TERMINAL = frozenset({"finished", "stopped", "crashed", "not-running"})
FIRST_POLL_S, LAST_POLL_S = 1.0, 10.0  # a poll costs the host 0.6 s of CPU


def plan(box: Box, *, until: str = "healthy", timeout_s: float = 600.0, run_id: str = "") -> Plan:
    _words(until)
    text = f"look until the verdict is {until}, at most {timeout_s:g} s"
    return Plan("wait", (Step(text, "snapshot", status.look_args(run_id), repeats=True),))


def run(
    box: Box, console: Console, *, until: str = "healthy", timeout_s: float = 600.0, run_id: str = ""
) -> Outcome:
    """Exit code 0 once the verdict is `until`, or one of several with commas between; the verdict's own code
    when the run ended otherwise.

    Raises WaitTimedOut. An unreachable box is waited for: it may come back.
    """
    wanted = _words(until)
    began, pause = time.monotonic(), FIRST_POLL_S
    while True:
        verdict, snapshot = status.look(box, run_id, log_lines=8, again=True)
        line = render.one_line(box.label, verdict, snapshot)
        waited = time.monotonic() - began
        if verdict.word in wanted or verdict.word in TERMINAL:
            console.clear()
            code = 0 if verdict.word in wanted else verdict.exit_code
            document = {**verdict.as_json(), "until": until, "waited_s": round(waited, 3)}
            evidence = "".join(f"\n  | {text}" for text in verdict.evidence[-8:])
            return Outcome(document, line + evidence, code, verdict.word)
        if waited >= timeout_s:
            console.clear()
            raise WaitTimedOut(
                f"{box.label} is not {until} after {timeout_s:g} s: {line}",
                verdict.mend or _onward(verdict.word),
                evidence=verdict.reasons,
            )
        console.progress(line)
        time.sleep(min(pause, max(0.0, timeout_s - waited)))
        pause = min(LAST_POLL_S, pause * 1.3)


def _onward(word: str) -> str:
    goes_on = word in ("starting", "warming-up", "healthy")
    return "the run goes on: the same command waits on" if goes_on else "invoke status"


def _words(until: str) -> list[str]:
    found = [word.strip() for word in until.split(",")]
    for word in found:
        if word not in EXIT_CODES:
            raise Usage(f"no verdict is called '{word}'", f"one of: {', '.join(EXIT_CODES)}")
    return found
