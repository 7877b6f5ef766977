"""Say of a run that it stays, whatever is pruned."""

from __future__ import annotations

from typing import Any

from controller.call import call
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step


def plan(box: Box, *, run_id: str = "", off: bool = False, reason: str = "") -> Plan:
    word = "take the pin from" if off else "pin"
    return Plan(
        "runs.pin", (Step(f"{word} {run_id or 'the newest run'}", "pin", _args(run_id, off, reason)),)
    )


def run(box: Box, console: Console, *, run_id: str = "", off: bool = False, reason: str = "") -> Outcome:
    result = call(box, "pin", _args(run_id, off, reason))
    word = "pinned" if result["pinned"] else "not pinned"
    return Outcome(result, f"{result['run']} is {word}{'' if result['changed'] else ', as it was'}")


def _args(run_id: str, off: bool, reason: str) -> dict[str, Any]:
    return {"run": run_id or None, "off": off, "reason": reason}
