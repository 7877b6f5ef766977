"""See a run live over one long `pct exec`: a look costs next to nothing, and a cut is mended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from controller import render, watch_lost, watch_view
from controller.console import Console, screen_width
from controller.errors import FINAL, Unreachable, Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step
from controller.status import GPU_DEADLINE_S
from controller.watch_looks import Looks

if TYPE_CHECKING:
    from controller.notify_watch import Teller

LEAST_S = 0.2  # a look takes the container 30 ms; more often shows nothing new
RETRY_S = (1.0, 2.0, 5.0, 10.0)


def plan(
    box: Box, *, run_id: str = "", every_s: float = 2.0, capture: bool = False, notify: bool = False
) -> Plan:
    _check(every_s)
    text = f"look every {every_s:g} s until the run has ended"
    if notify:
        text += ", and tell of changes where the run's own notifier does not"
    return Plan("watch", (Step(text, "watch", _args(run_id, every_s)),))


def run(
    box: Box,
    console: Console,
    *,
    run_id: str = "",
    every_s: float = 2.0,
    capture: bool = False,
    notify: bool = False,
) -> Outcome:
    """Show the run until it has ended; the exit code is that of its last verdict.

    A connection that breaks is made anew for ever, and the screen says so meanwhile. Raises Unreachable only
    when the first attempt fails. With `capture` nothing is shown.
    """
    _check(every_s)
    teller = _teller(box) if notify else None
    began, looks, view, cuts = time.monotonic(), Looks(box), watch_view.choose(capture), 0
    seen, lost = looks.seen, watch_lost.Lost(view, box.label)

    def show(part: dict[str, Any]) -> None:
        lost.end()
        verdict = looks.take(part)
        view.show(box.label, verdict, seen)
        if teller:
            teller.take(verdict, seen.snapshot)

    failures = 0
    try:
        while True:
            before = seen.looks
            try:
                result = looks.follow(_args(run_id, every_s), show)
                break
            except Unreachable as error:
                lost.end()
                if not seen.looks or isinstance(error, FINAL):
                    raise
                cuts += 1
                failures = 0 if seen.looks > before else failures + 1
                pause = RETRY_S[min(failures, len(RETRY_S) - 1)]
                lost.begin(error, looks.verdict.word, seen, pause)
                time.sleep(pause)
    finally:
        lost.end()
        view.close()
    verdict = looks.verdict
    if teller:
        teller.finish()
    document = {
        **verdict.as_json(),
        "run": result["run"],
        "looks": seen.looks,
        "reconnects": cuts,
        "seconds": round(time.monotonic() - began, 3),
    }
    if teller:
        document["notify"] = teller.report(console)
    plain = isinstance(view, watch_view.Lines)  # it has said so already
    text = "" if plain else render.screen(box.label, verdict, seen.snapshot, width=screen_width())
    return Outcome(document, text, verdict.exit_code, verdict.word)


def _teller(box: Box) -> Teller:
    from controller.notify_watch import (
        Teller,
    )  # a web client: 5 ms that a plain watch need not pay

    return Teller(box)


def _check(every_s: float) -> None:
    if every_s < LEAST_S:
        raise Usage(f"--every wants {LEAST_S:g} seconds or more, not {every_s:g}")


def _args(run_id: str, every_s: float) -> dict[str, Any]:
    return {"run": run_id or None, "interval_s": every_s, "gpu_deadline_s": GPU_DEADLINE_S}
