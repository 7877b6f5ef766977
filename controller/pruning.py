"""Removing old things from a container is one conversation, whatever they are: said, asked, done exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller import words
from controller.call import call
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

Json = dict[str, Any]


@dataclass(frozen=True)
class Pruning:
    """One kind of things: the task, the agent's verb and the argument that names the chosen ones, the noun,
    and how one of them, those that stay, and the case of nothing to do are told."""

    task: str
    verb: str
    chosen: str
    noun: str
    line: Callable[[Json], str]
    why: Callable[[Json], str]
    nothing: Callable[[Json], str]

    def args(self, keep: int, chosen: list[str]) -> Json:
        return {"keep": keep, self.chosen: chosen}


def plan(kind: Pruning, keep: int) -> Plan:
    return Plan(
        kind.task,
        (
            Step(f"look which {kind.noun}s may go, change nothing", kind.verb, kind.args(keep, [])),
            Step("ask", ""),
            Step("remove exactly those", kind.verb, kind.args(keep, ["(those)"]), maybe=True),
        ),
    )


def run(kind: Pruning, box: Box, console: Console, *, keep: int, yes: bool) -> Outcome:
    """Raises Declined when the answer is no, Usage when nobody was there to give one."""
    seen = call(box, kind.verb, kind.args(keep, []))
    doomed: list[Json] = seen["doomed"]
    document = {"removed": [], "freed_bytes": 0, "doomed": doomed, "kept": seen["kept"]}
    if not doomed:
        return Outcome(document, kind.nothing(seen) + kind.why(seen))
    for each in doomed:
        console.note(f"  {kind.line(each)}")
    what = words.plural(len(doomed), kind.noun)
    if not yes:
        size = words.size(seen["freed_bytes"])
        console.confirm(f"remove {what} of {box.label}, {size}?", "nothing was removed")
    chosen = [each["id"] for each in doomed]
    done = call(box, kind.verb, kind.args(keep, chosen), on_note=console.agent_note)
    console.clear()
    document |= {"removed": done["removed"], "freed_bytes": done["freed_bytes"]}
    gone = words.plural(len(done["removed"]), kind.noun)
    return Outcome(document, f"removed {gone}, {words.size(done['freed_bytes'])} freed" + kind.why(seen))
