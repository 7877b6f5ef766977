"""Remove old runs from the container: first said which and how much that frees, then asked, then done."""

from __future__ import annotations

from controller import pruning, runs, words
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan
from controller.pruning import Json, Pruning


def plan(box: Box, *, keep: int, yes: bool = False) -> Plan:
    return pruning.plan(RUNS, keep)


def run(box: Box, console: Console, *, keep: int, yes: bool = False) -> Outcome:
    """Never a live or pinned run, nor one whose checkpoint a kept run resumes. Their records stay here.

    Raises Declined when the answer is no, Usage when nobody was there to give one.
    """
    return pruning.run(RUNS, box, console, keep=keep, yes=yes)


def _line(each: Json) -> str:
    held = [f"checkpoint at step {each['last_checkpoint']}"] if each["last_checkpoint"] is not None else []
    held += ["export"] if each["export"] else []
    size, holds = words.size(each["bytes"]), f" ({', '.join(held)})" if held else ""
    return f"{each['id']}  {runs.clock(each['created'])}  {each['recipe'] or '?'}  {size}{holds}"


def _why(seen: Json) -> str:
    """The kept runs that are not simply among the newest."""
    special = [f"{run_id} ({why})" for run_id, why in seen["kept"].items() if not why.startswith("one of")]
    return f"; kept besides the newest: {', '.join(special)}" if special else ""


def _nothing(seen: Json) -> str:
    return f"nothing to remove, {words.plural(len(seen['kept']), 'run')} in all"


RUNS = Pruning("runs.prune", "prune", "runs", "run", _line, _why, _nothing)
