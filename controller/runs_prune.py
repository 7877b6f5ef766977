"""Remove old runs from the container: first said which and how much that frees, then asked, then done."""

from __future__ import annotations

from typing import Any

from controller import runs, words
from controller.call import call
from controller.console import Console
from controller.errors import Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

Json = dict[str, Any]


def plan(box: Box, *, keep: int, yes: bool = False) -> Plan:
    return Plan(
        "runs.prune",
        (
            Step("look which runs may go, change nothing", "prune", _args(keep, [])),
            Step("ask", ""),
            Step("remove exactly those", "prune", _args(keep, ["(those)"]), maybe=True),
        ),
    )


def run(box: Box, console: Console, *, keep: int, yes: bool = False) -> Outcome:
    """Never a live or pinned run, nor one whose checkpoint a kept run resumes. Their records stay here.

    Raises Usage when nobody was there to say yes.
    """
    seen = call(box, "prune", _args(keep, []))
    doomed: list[Json] = seen["doomed"]
    document = {"removed": [], "freed_bytes": 0, "doomed": doomed, "kept": seen["kept"]}
    if not doomed:
        stay = words.plural(len(seen["kept"]), "run")
        return Outcome(document, f"nothing to remove, {stay} in all{_why(seen)}")
    for each in doomed:
        console.note(_line(each))
    question = f"remove {words.plural(len(doomed), 'run')} of {box.label}, {words.size(seen['freed_bytes'])}?"
    if not yes and not console.confirmed(question):
        raise Usage(f"nothing was removed: {question.removesuffix('?')} was not confirmed", "--yes says so")
    done = call(box, "prune", _args(keep, [each["id"] for each in doomed]), on_note=console.agent_note)
    console.clear()
    document |= {"removed": done["removed"], "freed_bytes": done["freed_bytes"]}
    text = f"removed {words.plural(len(done['removed']), 'run')}, {words.size(done['freed_bytes'])} freed"
    return Outcome(document, text + _why(seen))


def _args(keep: int, chosen: list[str]) -> Json:
    return {"keep": keep, "runs": chosen}


def _line(each: Json) -> str:
    held = [f"checkpoint at step {each['last_checkpoint']}"] if each["last_checkpoint"] is not None else []
    held += ["export"] if each["export"] else []
    size, holds = words.size(each["bytes"]), f" ({', '.join(held)})" if held else ""
    return f"  {each['id']}  {runs.clock(each['created'])}  {each['recipe'] or '?'}  {size}{holds}"


def _why(seen: Json) -> str:
    """The kept runs that are not simply among the newest."""
    special = [f"{run_id} ({why})" for run_id, why in seen["kept"].items() if not why.startswith("one of")]
    return f"; kept besides the newest: {', '.join(special)}" if special else ""
