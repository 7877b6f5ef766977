"""Two runs side by side: what was different about them, beside what came of it in speed, loss and τ."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from controller import attempts, history, runs, runs_show, runs_window, source, words
from controller.console import Console, screen_width
from controller.errors import Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

Json = dict[str, Any]

_POINTS = 600  # rows of a curve: up to so many steps are compared one by one
_LEAST = 10  # columns of a cell, however narrow the terminal
_FORMS = {"loss": "{:.4f}", "τ": "{:.3f}"}  # as runs.show has them


@dataclass(frozen=True)
class Row:
    """One thing in both runs; `change` is b / a - 1 where both are numbers."""

    group: str
    name: str
    a: Any
    b: Any
    change: float | None = None


def plan(box: Box, *, first: str, second: str) -> Plan:
    args = history.args([first, second], detail=True, points=_POINTS)
    return Plan("runs.diff", (Step(f"look at {first} and {second}, change nothing", "runs", args),))


def run(box: Box, console: Console, *, first: str, second: str) -> Outcome:
    found = history.look(box, [first, second], detail=True, points=_POINTS)
    history.tell(found, console)
    if len(found.entries) == 1:
        raise Usage(f"{found.entries[0]['id']} is one run, a comparison wants two", "invoke runs lists them")
    a, b = found.entries
    differs, came = list(differences(a, b)), list(outcomes(a, b, found.now))
    window = runs_window.shared(a, b)
    document = {
        "a": a["id"],
        "b": b["id"],
        "window": [window.first, window.last] if window else None,
        "differs": [vars(row) for row in differs],
        "outcome": [vars(row) for row in came],
    }
    apart = runs_window.apart(a, b) if window is None else ""
    return Outcome(document, "\n".join(_screen(box, a["id"], b["id"], differs, came, apart)))


def differences(a: Json, b: Json) -> Iterator[Row]:
    """Everything recorded that is not the same in both: code, recipe, versions, packages, hardware, start."""
    record_a, record_b = a.get("record") or {}, b.get("record") or {}
    place_a, place_b = a.get("provenance") or {}, b.get("provenance") or {}
    yield from _unequal("code", {"release": record_a.get("release")}, {"release": record_b.get("release")})
    commits = ({"commit": source.text(place.get("source"))} for place in (place_a, place_b))
    yield from _unequal("code", *commits)
    recipe_a, recipe_b = place_a.get("recipe"), place_b.get("recipe")
    if recipe_a and recipe_b:
        yield from _unequal("recipe", _flat(recipe_a), _flat(recipe_b))
    else:  # one of them was started before every value was recorded
        yield from _unequal("recipe", _asked(record_a), _asked(record_b))
    versions_a, versions_b = record_a.get("versions") or {}, record_b.get("versions") or {}
    yield from _unequal("versions", versions_a, versions_b)
    named = versions_a.keys() | versions_b.keys()
    packages = (
        {key: value for key, value in (place.get("packages") or {}).items() if key not in named}
        for place in (place_a, place_b)
    )
    if place_a.get("packages") and place_b.get("packages"):
        yield from _unequal("packages", *packages)
    yield from _unequal("hardware", _hardware(place_a), _hardware(place_b))
    yield from _unequal("start", _start(record_a), _start(record_b))


def outcomes(a: Json, b: Json, now: float | None) -> Iterator[Row]:
    """Speed, loss and τ of both; loss and τ also where both were at the same steps."""
    x, y = history.figures(a, now), history.figures(b, now)
    yield Row("run", "verdict", x.word, y.word)
    yield Row("run", "step", x.step, y.step)
    again = [{"restarts": attempts.restarted(each)} for each in (a, b)]
    yield from _unequal("run", *again)
    yield _compared("speed", "tok/s", x.tokens_per_s, y.tokens_per_s)
    yield _compared("speed", "s a step", x.step_s, y.step_s)
    window = runs_window.shared(a, b)
    if window is not None:
        losses = (runs_window.loss(each, window) for each in (a, b))
        yield _compared("loss", f"mean of {window}", *losses)
    over = "/".join(dict.fromkeys(str(each.loss_steps) for each in (x, y) if each.loss_steps))
    yield _compared("loss", f"mean of last {over}", x.loss, y.loss, alike=x.step == y.step)
    taus = [{each["step"]: each["tau"] for each in entry.get("evaluations") or []} for entry in (a, b)]
    both, *lasts = (max(steps, default=None) for steps in (taus[0].keys() & taus[1].keys(), *taus))
    if both is not None and lasts != [both, both]:
        yield _compared("τ", f"at step {both}", taus[0][both], taus[1][both])
    yield _compared("τ", "last", x.tau, y.tau, alike=lasts[0] == lasts[1])
    yield _compared("τ", "best", x.best_tau, y.best_tau)


def _compared(group: str, name: str, a: float | None, b: float | None, *, alike: bool = True) -> Row:
    """`alike`: whether a change would be of the runs, and not of how far each one came."""
    change = b / a - 1 if alike and a and b is not None else None
    return Row(group, name, a, b, change)


def _unequal(group: str, a: Json, b: Json) -> Iterator[Row]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield Row(group, name, a.get(name), b.get(name))


def _flat(tree: Json, prefix: str = "") -> Json:
    """`{"train": {"lr": 1}}` as `{"train.lr": 1}`."""
    found: Json = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        found.update(_flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return found


def _asked(record: Json) -> Json:
    return {"recipe": record.get("recipe"), **(record.get("overrides") or {})}


def _hardware(place: Json) -> Json:
    machine = place.get("machine") or {}
    return {"gpus": runs_show.gpus(place.get("gpus") or {}), **machine}


def _start(record: Json) -> Json:
    begin, cache = record.get("resume_from"), record.get("cache") or {}
    return {
        "resumed": f"{begin['run']} step {begin['step']}" if begin else "no",
        "cache": cache.get("choice"),
    }


def _screen(box: Box, a: str, b: str, differs: list[Row], came: list[Row], apart: str) -> Iterator[str]:
    told = (*differs, *(row for row in came if row.a is not None or row.b is not None))
    shown = [(row.group, row.name, _cell(row, row.a), _cell(row, row.b), _change(row)) for row in told]
    widths = _widths([("", "", a, b, ""), *shown], screen_width())
    yield f"{box.label}  {a} against {b}: {words.plural(len(differs), 'difference')}"
    yield from _lines(("", "", a, b, ""), widths)
    previous = ""
    for cells in shown:
        yield from _lines((cells[0] if cells[0] != previous else "", *cells[1:]), widths)
        previous = cells[0]
    if not differs:
        yield "  nothing that is recorded differs: what came of them differs by chance"
    yield from textwrap.wrap(apart, screen_width(), initial_indent="  ", subsequent_indent="  ")


def _widths(lines: list[tuple[str, ...]], most: int) -> list[int]:
    """Of the columns; the two runs' share what the others leave, and what one does not need the other has."""
    needed = [max(len(line[column]) for line in lines) for column in range(5)]
    room = most - 2 - 2 * 4 - needed[0] - needed[1] - needed[4]
    first = max(_LEAST, min(needed[2], max(room // 2, room - needed[3])))
    second = max(_LEAST, min(needed[3], room - first))
    return [*needed[:2], first, second, needed[4]]


def _lines(cells: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    """One row; what is longer than its column goes on below, for the end of a path is where two differ."""
    wrapped = [textwrap.wrap(text, width) for text, width in zip(cells, widths, strict=True) if width]
    kept = [width for width in widths if width]
    for parts in itertools.zip_longest(*wrapped, fillvalue=""):
        padded = (f"{text:<{width}}" for text, width in zip(parts, kept, strict=True))
        yield f"  {'  '.join(padded)}".rstrip()


def _cell(row: Row, value: Any) -> str:
    if value is None:
        return runs.NONE
    if isinstance(value, float):
        return _FORMS.get(row.group, "{:.4g}").format(value)
    return str(value)


def _change(row: Row) -> str:
    return "" if row.change is None else f"{100 * row.change:+.1f} %"
