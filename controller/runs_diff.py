"""Two runs side by side: what was different about them, beside what came of it in speed, loss and τ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from controller import attempts, history, runs, runs_show, source, words
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

Json = dict[str, Any]

_CELL = 32  # columns
_WINDOW = 0.1  # of the common length: a loss at a step is the mean of the last tenth before it


@dataclass(frozen=True)
class Row:
    """One thing in both runs; `change` is b / a - 1 where both are numbers."""

    group: str
    name: str
    a: Any
    b: Any
    change: float | None = None


def plan(box: Box, *, first: str, second: str) -> Plan:
    args = history.args([first, second], detail=True)
    return Plan("runs.diff", (Step(f"look at {first} and {second}, change nothing", "runs", args),))


def run(box: Box, console: Console, *, first: str, second: str) -> Outcome:
    found = history.look(box, [first, second], detail=True)
    if found.why:
        console.note(f"{found.why}; what follows is from memory")
    a, b = found.entries
    differs, came = list(differences(a, b)), list(outcomes(a, b, found.now))
    document = {
        "a": a["id"],
        "b": b["id"],
        "differs": [vars(row) for row in differs],
        "outcome": [vars(row) for row in came],
    }
    return Outcome(document, "\n".join(_screen(box, a["id"], b["id"], differs, came)))


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
    """Speed, loss and τ of both; the loss also at the last step that both have reached."""
    x, y = history.figures(a, now), history.figures(b, now)
    yield Row("run", "verdict", x.word, y.word)
    yield _compared("run", "step", x.step, y.step)
    again = [{"restarts": attempts.restarted(each)} for each in (a, b)]
    yield from _unequal("run", *again)
    yield _compared("speed", "tok/s", x.tokens_per_s, y.tokens_per_s)
    yield _compared("speed", "s a step", x.step_s, y.step_s)
    common = min(_last_step(a), _last_step(b))
    if common:
        yield _compared("loss", f"at step {common}", _loss_at(a, common), _loss_at(b, common))
    yield _compared("loss", "at its end", x.loss, y.loss)
    yield _compared("τ", "last", x.tau, y.tau)
    yield _compared("τ", "best", x.best_tau, y.best_tau)


def _compared(group: str, name: str, a: float | None, b: float | None) -> Row:
    change = b / a - 1 if a and b is not None else None
    return Row(group, name, a, b, change)


def _last_step(entry: Json) -> int:
    steps = (entry.get("curves") or {}).get("steps") or [0]
    return int(steps[-1])


def _loss_at(entry: Json, step: int) -> float | None:
    curves = entry.get("curves") or {}
    pairs = zip(curves.get("steps") or [], curves.get("loss") or [], strict=False)
    before = [(at, loss) for at, loss in pairs if at <= step and loss is not None]
    if not before:
        return None
    first = before[0][0]
    recent = [loss for at, loss in before if at > step - _WINDOW * (step - first)]
    return statistics.fmean(recent or [before[-1][1]])


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


def _screen(box: Box, a: str, b: str, differs: list[Row], came: list[Row]) -> Iterator[str]:
    told = (*differs, *(row for row in came if row.a is not None or row.b is not None))
    shown = [(row.group, row.name, _cell(row.a), _cell(row.b), _change(row)) for row in told]
    lines = [("", "", a, b, ""), *shown]
    widths = [min(_CELL, max(len(line[column]) for line in lines)) for column in range(5)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (f"{_cut(text, width):<{width}}" for text, width in zip(cells, widths, strict=True))
        return f"  {'  '.join(padded)}".rstrip()

    yield f"{box.label}  {a} against {b}: {words.plural(len(differs), 'difference')}"
    yield line(lines[0])
    previous = ""
    for cells in lines[1:]:
        yield line((cells[0] if cells[0] != previous else "", *cells[1:]))
        previous = cells[0]
    if not differs:
        yield "  nothing that is recorded differs: what came of them differs by chance"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _cell(value: Any) -> str:
    if value is None:
        return runs.NONE
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _change(row: Row) -> str:
    return "" if row.change is None else f"{100 * row.change:+.1f} %"
