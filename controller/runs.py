"""Every run of a box in one table, newest first: what it was, how it ended, how fast, how good."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from typing import Any

from controller import attempts, history, words
from controller.console import Console, table_width
from controller.history import Figures, History
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

Json = dict[str, Any]

_HEAD = (
    "",
    "run",
    "verdict",
    "seen",
    "started",
    "step",
    "from",
    "tok/s",
    "loss",
    "τ",
    "set",
    "recipe",
    "release",
    "by",
)
_RIGHT = (5, 7, 8, 9)
_FIRST_TO_GO = ("by", "release", "started", "from", "set", "recipe")  # where a terminal is too narrow for all
_LOSS = f"loss: mean of each run's last {history.SMOOTH} steps (or all); status has the last one's"
_STEPS = "train.steps"  # stands in the column `step`
NONE = "–"


def plan(box: Box, *, limit: int = 20) -> Plan:
    return Plan("runs", (Step("look at the runs, change nothing", "runs", history.args(limit=limit)),))


def run(box: Box, console: Console, *, limit: int = 20) -> Outcome:
    """The table; from memory, and said so, while the box cannot be reached."""
    found = history.look(box, limit=limit)
    history.tell(found, console)
    rows = [document(entry, found) for entry in found.entries]
    table = _table(rows, found, table_width())
    return Outcome({"runs": rows, "total": found.total, "from_memory": bool(found.why)}, table)


def document(entry: Json, found: History) -> Json:
    """One run for `--json` and for the table."""
    record, place = entry.get("record") or {}, entry.get("provenance") or {}
    verdict = history.verdict_of(entry, found.now)
    return {
        "id": entry["id"],
        "verdict": verdict.word,
        "summary": verdict.summary,
        "reasons": list(verdict.reasons),
        "created": record.get("created"),
        "recipe": record.get("recipe"),
        "release": record.get("release"),
        "source": place.get("source"),
        "operator": record.get("operator"),
        "resume_from": record.get("resume_from"),
        "overrides": record.get("overrides") or {},
        "config_hash": record.get("config_hash"),
        "restarted": attempts.restarted(entry),
        "pinned": bool(entry.get("pin")),
        "seen_at": entry.get("seen_at"),
        "checkpoints": [each["step"] for each in entry.get("checkpoints") or []],
        "export": bool(entry.get("export")),
        **_plain(history.figures(entry, found.now)),
    }


def _plain(figures: Figures) -> Json:
    values = dataclasses.asdict(figures)
    del values["word"]
    return values


def clock(at: float | None) -> str:
    return NONE if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%b %d %H:%M")


def operator(who: Any) -> str:
    return f"{who.get('user', '?')}@{who.get('host', '?')}" if isinstance(who, dict) and who else NONE


def number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _table(rows: list[Json], found: History, most: int | None = None) -> str:
    """The runs in `most` characters a line; what does not fit is said once below, or said to be left out."""
    if not rows:
        return "no run yet: invoke restart"
    changed = _changed([each["overrides"] for each in rows])
    lines = [_HEAD, *(_row(each, wish) for each, wish in zip(rows, changed, strict=True))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    told = {"from": any(each["resume_from"] for each in rows), "seen": any(each["seen_at"] for each in rows)}
    told["set"] = any(changed)
    columns = [each for each, name in enumerate(_HEAD) if told.get(name, True)]
    columns, below = _fitting(columns, lines[1:], widths, most) if most else (columns, [])
    shown: list[str] = []
    for line in lines:
        cells = [
            f"{line[each]:>{widths[each]}}" if each in _RIGHT else f"{line[each]:<{widths[each]}}"
            for each in columns
        ]
        row = "  ".join(cells).rstrip()
        shown.append(row if most is None else words.cut(row, most))
    more = found.total - len(rows)
    if more > 0:
        shown.append(f"and {more} older: --limit 0 shows them")
    shown += below
    if any(each["loss"] is not None for each in rows):
        shown.append(_LOSS)
    shown.append("next  invoke runs.show RUN   |   invoke runs.diff A B   |   invoke plot A,B")
    return "\n".join(shown)


def _fitting(
    wanted: list[int], rows: Sequence[tuple[str, ...]], widths: list[int], most: int
) -> tuple[list[int], list[str]]:
    """Those of the columns that fit into `most` characters, and a line on those that do not: first goes what
    is the same in every row, since nothing is lost by saying it once."""
    columns, alike, missing = list(wanted), [], []
    may_go = [name for name in _FIRST_TO_GO if _HEAD.index(name) in wanted]
    values = {name: {row[_HEAD.index(name)] for row in rows} for name in may_go}
    for name in sorted(may_go, key=lambda name: len(values[name]) > 1):  # a stable order
        if sum(widths[each] + 2 for each in columns) - 2 <= most:
            break
        columns.remove(_HEAD.index(name))
        if len(values[name]) > 1:
            missing.append(name)
        else:
            alike.append(f"{name} {values[name].pop()}")
    below = [f"every run: {', '.join(alike)}"] if alike else []
    if missing:
        below.append(f"no room for {', '.join(missing)}: runs.show RUN tells them")
    return columns, below


def _changed(overrides: Sequence[Json]) -> list[str]:
    """Of each run's overrides those in which these runs differ, as `--set` has them; a key by its last name
    where that says which."""
    keys = sorted({key for each in overrides for key in each} - {_STEPS})
    differ = [key for key in keys if any(each.get(key) != overrides[0].get(key) for each in overrides)]
    last = [key.rpartition(".")[2] for key in differ]
    names = {key: name if last.count(name) == 1 else key for key, name in zip(differ, last, strict=True)}
    return [
        " ".join(f"{name}={each[key]}" for key, name in names.items() if key in each) for each in overrides
    ]


def _row(each: Json, changed: str) -> tuple[str, ...]:
    seen = f"{words.age(time.time() - each['seen_at'])} ago" if each["seen_at"] else ""
    steps = f"{each['step']}/{each['steps']}" if each["steps"] else str(each["step"])
    rate, begin = each["tokens_per_s"], each["resume_from"]
    return (
        "*" if each["pinned"] else "",
        each["id"],
        each["verdict"].upper(),
        seen,
        clock(each["created"]),
        steps,
        f"{begin['run']}@{begin['step']}" if begin else NONE,
        NONE if rate is None else words.rate(rate).removesuffix(" tok/s"),
        number(each["loss"], "{:.3f}"),
        number(each["tau"], "{:.2f}"),
        changed or NONE,
        str(each["recipe"] or NONE),
        str(each["release"] or NONE)[:8],
        operator(each["operator"]),
    )
