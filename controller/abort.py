"""Stop the run and lose nothing: it ends its step, writes a checkpoint, says where it will resume."""

from __future__ import annotations

from controller import stopping
from controller.call import call
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step


def plan(box: Box, *, run_id: str = "", reason: str = "") -> Plan:
    step = Step(
        f"stop {run_id or 'the newest run'}: checkpoint, at most {box.grace_s:g} s of grace, then SIGKILL",
        "stop",
        stopping.args(box, run=run_id, reason=reason),
    )
    return Plan("abort", (step,))


def run(box: Box, console: Console, *, run_id: str = "", reason: str = "") -> Outcome:
    """Stopping what does not run succeeds and says so; processes that survive SIGKILL make it exit 1."""
    result = call(box, "stop", stopping.args(box, run=run_id, reason=reason), on_note=console.agent_note)
    return Outcome(result, stopping.text(result), 1 if result.get("survivors") else 0)
