"""Two environments side by side: every package and version that is not the same in both."""

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


def plan(box: Box, *, first: str, second: str) -> Plan:
    step = Step(f"look at {first} and {second}, change nothing", "env-list", _args(first, second))
    return Plan("env.diff", (step,))


def run(box: Box, console: Console, *, first: str, second: str) -> Outcome:
    a, b = call(box, "env-list", _args(first, second))["environments"]
    x, y = contents(a), contents(b)
    differs = [
        {"name": name, "a": x.get(name), "b": y.get(name)}
        for name in sorted(x.keys() | y.keys())
        if x.get(name) != y.get(name)
    ]
    document = {
        "a": _named(a),
        "b": _named(b),
        "differs": differs,
        "same": len(x.keys() & y.keys())
        - sum(row["a"] is not None and row["b"] is not None for row in differs),
    }
    return Outcome(document, "\n".join(_screen(box, document)))


def contents(record: Json) -> Json:
    """Name -> version of all that is in it; what was built there also says for what."""
    found = {"python": record.get("python"), **(record.get("packages") or {})}
    for each in record.get("built") or []:
        if each.get("arch"):
            found[each["name"]] = f"{each['version']} (nvcc {each['nvcc']}, {each['arch']})"
    return found


def _args(first: str, second: str) -> Json:
    if not first or not second:
        raise Usage("env.diff compares two environments", "invoke env.diff current previous")
    return {"only": [first, second]}


def _named(record: Json) -> Json:
    return {"id": record["id"], "name": record.get("name")}


def _screen(box: Box, document: Json) -> list[str]:
    names = [f"{each['name']} {each['id'][:8]}" for each in (document["a"], document["b"])]
    rows = [(row["name"], row["a"] or runs.NONE, row["b"] or runs.NONE) for row in document["differs"]]
    counted = words.plural(len(rows), "difference")
    lines = [f"{box.label}  {names[0]} against {names[1]}: {counted}, {document['same']} the same"]
    table = [("", *names), *rows] if rows else []
    widths = [max(len(row[column]) for row in table) for column in range(3)] if table else []
    for row in table:
        lines.append(
            "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return lines
