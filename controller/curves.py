"""What is plotted of runs: panels of named lines over steps or over time, as the agent told of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Point = tuple[float, float]

AXES = ("step", "time")


@dataclass(frozen=True)
class Line:
    """One run's curve in a panel; `kind` tells several of one run apart (the threads' kinds), else empty."""

    run: str
    kind: str
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        return f"{self.run} {self.kind}".strip()


@dataclass(frozen=True)
class Panel:
    name: str
    unit: str
    lines: tuple[Line, ...]


def panels(entries: Sequence[Json], axis: str) -> list[Panel]:
    """Loss, τ, rate and how busy the threads were, over `axis`: steps, or seconds since each run began."""
    made = [
        Panel("loss", "", tuple(_columns(entries, axis, "loss"))),
        Panel("τ", "tokens a cycle", tuple(_taus(entries, axis))),
        Panel("speed", "tok/s", tuple(_columns(entries, axis, "tokens_per_s"))),
        Panel("busy", "% of the time", tuple(_busy(entries, axis))),
    ]
    return [panel for panel in made if panel.lines]


def _columns(entries: Sequence[Json], axis: str, name: str) -> Iterator[Line]:
    for entry in entries:
        curves = entry.get("curves") or {}
        points = _points(_xs(entry, axis), curves.get(name) or [])
        if points:
            yield Line(entry["id"], "", points)


def _taus(entries: Sequence[Json], axis: str) -> Iterator[Line]:
    for entry in entries:
        told = entry.get("evaluations") or []
        xs = [each["step"] if axis == "step" else _seconds(entry, each.get("time")) for each in told]
        points = _points(xs, [each["tau"] for each in told])
        if points:
            yield Line(entry["id"], "", points)


def _busy(entries: Sequence[Json], axis: str) -> Iterator[Line]:
    """The mean over the threads of a kind: `drafter-0` and `drafter-1` are both of kind `drafter`."""
    for entry in entries:
        kinds: dict[str, list[list[float | None]]] = {}
        for name, shares in ((entry.get("curves") or {}).get("busy") or {}).items():
            kinds.setdefault(kind_of(name), []).append(shares)
        for kind, columns in kinds.items():
            means = [_mean_percent(values) for values in zip(*columns, strict=False)]
            points = _points(_xs(entry, axis), means)
            if points:
                yield Line(entry["id"], kind, points)


def kind_of(thread: str) -> str:
    """`drafter` of `drafter-0`."""
    return thread.rstrip("0123456789").rstrip(" -_/") or thread


def _mean_percent(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return 100 * sum(known) / len(known) if known else None


def _xs(entry: Json, axis: str) -> list[float | None]:
    curves = entry.get("curves") or {}
    if axis == "step":
        return list(curves.get("steps") or [])
    return [_seconds(entry, at) for at in curves.get("times") or []]


def _seconds(entry: Json, at: float | None) -> float | None:
    created = (entry.get("record") or {}).get("created")
    return at - created if at is not None and created is not None else None


def _points(xs: Sequence[float | None], ys: Sequence[float | None]) -> tuple[Point, ...]:
    pairs = zip(xs, ys, strict=False)
    return tuple((x, y) for x, y in pairs if x is not None and y is not None)
