"""Go back to a release that is in the container already: proven, then switched, in one round trip."""

from __future__ import annotations

from typing import Any

from controller.call import call
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step


def plan(box: Box, *, release: str = "") -> Plan:
    what = f"release {release}" if release else "the previous release"
    step = Step(f"verify {what}, then make it the current one", "rollback", _args(release))
    return Plan("rollback", (step,))


def run(box: Box, console: Console, *, release: str = "") -> Outcome:
    """A second rollback undoes the first. A run that is alive keeps its release until `invoke restart`."""
    result = call(box, "rollback", _args(release), on_note=console.agent_note)
    if result["outcome"] == "unchanged":
        return Outcome(result, f"unchanged {result['release']}: it is the current release already")
    was = f", was {result['previous']}" if result["previous"] else ""
    alive = "; invoke restart lets the run use it" if result.get("alive") else ""
    return Outcome(result, f"switched {result['release']}{was}{alive}")


def _args(release: str) -> dict[str, Any]:
    return {"release": release or None}
