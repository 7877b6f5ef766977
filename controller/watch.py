"""See a run live over one long `pct exec`: a look costs next to nothing, and a cut is mended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from controller import history, render, watch_lost, watch_view
from controller.call import call
from controller.console import Console, screen_width
from controller.errors import FINAL, Unreachable, Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step
from controller.status import GPU_DEADLINE_S
from controller.verdict import Verdict, judge
from controller.watch_state import Seen

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
    began, seen, view, cuts = time.monotonic(), Seen(), watch_view.choose(capture), 0
    verdict, lost, remembered = Verdict("unreachable", "not looked yet"), watch_lost.Lost(view, box.label), 0

    def show(part: dict[str, Any]) -> None:
        nonlocal verdict
        lost.end()
        seen.take(part)
        verdict = judge(seen.snapshot, gpus=box.gpus, vmid=box.vmid, own=box.own)
        view.show(box.label, verdict, seen)
        if teller:
            teller.take(verdict, seen.snapshot)

    def remember() -> None:
        """So that a later `status` of a box that is gone knows what this watch saw last, and how long ago."""
        nonlocal remembered
        seen_run = (seen.snapshot or {}).get("run")
        if seen_run and seen.looks > remembered:
            remembered = seen.looks
            history.remember(box, seen_run, verdict.word)

    failures = 0
    try:
        while True:
            looks = seen.looks
            try:
                result = call(box, "watch", _args(run_id, every_s), on_part=show)
                break
            except Unreachable as error:
                lost.end()
                if not seen.looks or isinstance(error, FINAL):
                    raise
                cuts += 1
                remember()
                failures = 0 if seen.looks > looks else failures + 1
                pause = RETRY_S[min(failures, len(RETRY_S) - 1)]
                lost.begin(error, verdict.word, seen, pause)
                time.sleep(pause)
    finally:
        lost.end()
        view.close()
        remember()
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
