"""The environments of a container on one screen: what each is made of, and who keeps it from going."""

from __future__ import annotations

from typing import Any

from controller import runs, words
from controller.call import call
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

Json = dict[str, Any]

_SHOWN = ("torch", "transformers", "flash-linear-attention", "causal-conv1d")
_HEAD = ("", "name", "id", "python", "torch", "transformers", "fla", "conv1d", "size", "built", "in use")


def plan(box: Box) -> Plan:
    return Plan("env.list", (Step("look, change nothing", "env-list", {}),))


def run(box: Box, console: Console) -> Outcome:
    found = call(box, "env-list", {})
    document = {key: found[key] for key in ("current", "previous", "half_built", "building")}
    keys = ("id", "name", "created", "operator", "python", "cuda", "packages", "built", "bytes")
    rows = [{key: each.get(key) for key in keys} for each in found["environments"]]
    for row in rows:
        row["in_use"] = found["users"].get(row["id"])
    return Outcome({**document, "environments": rows}, "\n".join(_screen(rows, found)))


def _screen(rows: list[Json], found: Json) -> list[str]:
    lines = []
    if rows:
        table = [_HEAD, *(_cells(row, found["current"]) for row in rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(_HEAD))]
        for cells in table:
            lines.append(
                "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
            )
    else:
        lines.append("no environment yet: invoke env.build")
    for each in found["half_built"]:
        lines.append(f"half-built: {each[:8]}, by a build that was cut off; env.build or env.prune clears it")
    if found["building"]:
        lines.append(
            f"building now: {runs.operator(found['building'].get('operator'))}; env.build follows it"
        )
    return lines


def _cells(row: Json, current: str | None) -> tuple[str, ...]:
    packages = row["packages"] or {}
    versions = (packages.get(name, runs.NONE) for name in _SHOWN)
    return (
        "*" if row["id"] == current else "",
        str(row["name"]),
        str(row["id"])[:8],
        str(row["python"]),
        *versions,
        words.size(row["bytes"] or 0),
        runs.clock(row["created"]),
        row["in_use"] or "",
    )
