"""End another operator's command that holds a box, after a look at whose it is."""

from __future__ import annotations

from typing import Any

from controller import words
from controller.call import call
from controller.console import Console
from controller.errors import Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step


def plan(box: Box, *, yes: bool = False) -> Plan:
    args = {"pid": "(its)", "since": "(its)"}
    steps = (
        Step("look who holds the box, change nothing", "unlock", {}),
        Step("ask", ""),
        Step("end exactly that command", "unlock", args, maybe=True),
    )
    return Plan("unlock", steps)


def run(box: Box, console: Console, *, yes: bool = False) -> Outcome:
    """Raises Declined when the answer is no, Usage when nobody was there to give one. No run is touched."""
    seen = call(box, "unlock", {})
    if seen["outcome"] == "free":
        return Outcome(seen, "free: nobody holds this box")
    owner: dict[str, Any] = seen["owner"]
    who = owner.get("operator") or {}
    since = owner.get("since")
    age = f" for {words.age(seen['now'] - since)}" if since else ""
    holder = f"{who.get('user', '?')}@{who.get('host', '?')} holds {box.label}{age}"
    said = f"{holder} with {owner.get('verb') or 'a change'}"
    if owner.get("pid") is None:  # a full disk takes no names
        raise Usage(
            f"nothing was done: {said}, but not by which process", "make room on its disk, then again"
        )
    if not yes:
        console.confirm(f"{said}: end that?", "nothing was done")
    done = call(box, "unlock", {"pid": owner.get("pid"), "since": since})
    return Outcome(done, f"{done['outcome']}: {said}; invoke status shows what it left")
