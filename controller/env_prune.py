"""Remove environments that nothing uses: first said which and how much that frees, then asked, then done."""

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
        "env.prune",
        (
            Step("look which environments may go, change nothing", "env-prune", _args(keep, [])),
            Step("ask", ""),
            Step("remove exactly those", "env-prune", _args(keep, ["(those)"]), maybe=True),
        ),
    )


def run(box: Box, console: Console, *, keep: int, yes: bool = False) -> Outcome:
    """Never the current or previous one, nor one of a live or pinned run, nor one that a process has open.

    Raises Usage when nobody was there to say yes.
    """
    seen = call(box, "env-prune", _args(keep, []))
    doomed: list[Json] = seen["doomed"]
    document = {"removed": [], "freed_bytes": 0, "doomed": doomed, "kept": seen["kept"]}
    if not doomed:
        return Outcome(document, f"nothing to remove{_why(seen)}")
    for each in doomed:
        console.note(f"  {_line(each)}")
    size = words.size(seen["freed_bytes"])
    question = f"remove {words.plural(len(doomed), 'environment')} of {box.label}, {size}?"
    if not yes and not console.confirmed(question):
        raise Usage(f"nothing was removed: {question.removesuffix('?')} was not confirmed", "--yes says so")
    done = call(box, "env-prune", _args(keep, [each["id"] for each in doomed]), on_note=console.agent_note)
    console.clear()
    document |= {"removed": done["removed"], "freed_bytes": done["freed_bytes"]}
    freed = words.size(done["freed_bytes"])
    text = f"removed {words.plural(len(done['removed']), 'environment')}, {freed} freed"
    return Outcome(document, text + _why(seen))


def _args(keep: int, chosen: list[str]) -> Json:
    return {"keep": keep, "envs": chosen}


def _line(each: Json) -> str:
    name = each["name"] or "half-built"
    return f"{name} {each['id'][:8]}  {runs.clock(each['created'])}  {words.size(each['bytes'] or 0)}"


def _why(seen: Json) -> str:
    kept = [f"{env[:8]} ({why})" for env, why in seen["kept"].items()]
    return f"; kept: {', '.join(kept)}" if kept else ""
