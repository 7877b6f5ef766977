"""Know at any moment whether the run is fine: one look, one verdict, one screen."""

from __future__ import annotations

from typing import Any

from controller import history, render
from controller.call import call
from controller.console import Console, screen_width
from controller.deadline import Deadline
from controller.errors import NotRunning, Unreachable
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step
from controller.verdict import Verdict, judge

GPU_DEADLINE_S = 5.0  # nvidia-smi hangs in the kernel when a driver is unwell
_METRICS = 200  # lines: the window of the rate, and the losses that a recent trend needs
_LOOK = Deadline(total=60.0)


def look_args(run_id: str = "") -> dict[str, Any]:
    """The arguments of a snapshot."""
    return {
        "run": run_id or None,
        "log_lines": 12,
        "metrics_lines": _METRICS,
        "gpu_deadline_s": GPU_DEADLINE_S,
    }


def plan(box: Box, *, run_id: str = "") -> Plan:
    return Plan("status", (Step("look, change nothing", "snapshot", look_args(run_id)),))


def look(box: Box, run_id: str = "") -> tuple[Verdict, dict[str, Any] | None]:
    """One snapshot and the verdict on it. Being unable to look is a verdict too; other errors raise."""
    try:
        snapshot = call(box, "snapshot", look_args(run_id), deadline=_LOOK)
    except (Unreachable, NotRunning) as error:
        return unseen(box, error), None
    verdict = judge(snapshot, gpus=box.gpus, vmid=box.vmid, own=box.own)
    if snapshot.get("run"):
        history.remember(box, snapshot["run"], verdict.word)
    return verdict, snapshot


def unseen(box: Box, error: Unreachable | NotRunning) -> Verdict:
    """The verdict on a box that could not be looked at; raises `error` when that says something of a run."""
    off = isinstance(error, NotRunning)
    if off and error.kind != "container-stopped":
        raise error
    last = history.last_seen(box)
    return judge(None, why=error.message, mend=error.hint, last=last, container_off=off)


def run(box: Box, console: Console, *, run_id: str = "") -> Outcome:
    verdict, snapshot = look(box, run_id)
    document = {**verdict.as_json(), "snapshot": snapshot}
    screen = render.screen(box.label, verdict, snapshot, width=screen_width())
    line = render.among_others(box.label, verdict, snapshot)
    return Outcome(document, screen, verdict.exit_code, verdict.word, line)
