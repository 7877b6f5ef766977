"""Remove environments that nothing uses: first said which and how much that frees, then asked, then done."""

from __future__ import annotations

from controller import pruning, runs, words
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan
from controller.pruning import Json, Pruning


def plan(box: Box, *, keep: int, yes: bool = False) -> Plan:
    return pruning.plan(ENVIRONMENTS, keep)


def run(box: Box, console: Console, *, keep: int, yes: bool = False) -> Outcome:
    """Never the current or previous one, nor one of a live or pinned run, nor one that a process has open.

    Raises Declined when the answer is no, Usage when nobody was there to give one.
    """
    return pruning.run(ENVIRONMENTS, box, console, keep=keep, yes=yes)


def _line(each: Json) -> str:
    name = each["name"] or "half-built"
    return f"{name} {each['id'][:8]}  {runs.clock(each['created'])}  {words.size(each['bytes'] or 0)}"


def _why(seen: Json) -> str:
    kept = [f"{env[:8]} ({why})" for env, why in seen["kept"].items()]
    return f"; kept: {', '.join(kept)}" if kept else ""


ENVIRONMENTS = Pruning(
    "env.prune", "env-prune", "envs", "environment", _line, _why, lambda seen: "nothing to remove"
)
