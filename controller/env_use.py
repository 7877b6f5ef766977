"""Make another environment the current one: proven against the current release, then one link moves."""

from __future__ import annotations

from typing import Any

from controller.call import call
from controller.console import Console
from controller.errors import Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step


def plan(box: Box, *, env: str) -> Plan:
    return Plan("env.use", (Step(f"make {env} the current environment", "env-use", _args(env)),))


def run(box: Box, console: Console, *, env: str) -> Outcome:
    """`env.use previous` undoes it. A run that is alive keeps its environment until `invoke restart`."""
    result = call(box, "env-use", _args(env), on_note=console.agent_note)
    shown = f"{result['name']} {result['id'][:8]}"
    if result["outcome"] == "unchanged":
        return Outcome(result, f"unchanged {shown}: it is the current environment already")
    was = f", was {result['previous'][:8]}" if result["previous"] else ""
    return Outcome(result, f"switched {shown}{was}; the next restart uses it")


def _args(env: str) -> dict[str, Any]:
    if not env:
        raise Usage("say which environment", "invoke env.list shows them; env.use previous goes back")
    return {"env": env}
