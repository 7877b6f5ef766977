"""Losses of two runs over the very same steps: each one's own last tenth would be another part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from controller import history

Json = dict[str, Any]

_SHARE = 0.1  # of the steps that both made; where those are few, as many as every loss is smoothed over


@dataclass(frozen=True)
class Span:
    """Steps, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}–{self.last}"


def made(entry: Json) -> Span | None:
    """The steps that this run made itself: a resumed one begins where another ended. None without any."""
    curves = entry.get("curves") or {}
    steps = curves.get("steps")
    if not steps:
        return None
    # What an earlier version remembered has no `first`: its first row is then taken for its last step alone.
    first = curves.get("first")
    return Span(int(steps[0] if first is None else first), int(steps[-1]))


def shared(a: Json, b: Json) -> Span | None:
    """The last steps of those that both made; None where there are none."""
    mine, other = made(a), made(b)
    if mine is None or other is None:
        return None
    first, last = max(mine.first, other.first), min(mine.last, other.last)
    if first > last:
        return None
    length = max(history.SMOOTH, round(_SHARE * (last - first + 1)))
    return Span(max(first, last - length + 1), last)


def loss(entry: Json, span: Span) -> float | None:
    """Mean over the span. A long run's curve has rows that are means of several steps: one at the edge counts
    by how many of its steps lie within."""
    curves, own = entry.get("curves") or {}, made(entry)
    total, weight = 0.0, 0
    before = own.first - 1 if own else 0
    for step, mean in zip(curves.get("steps") or [], curves.get("loss") or [], strict=False):
        within = min(int(step), span.last) - max(before, span.first - 1)
        before = int(step)
        if mean is not None and within > 0:
            total, weight = total + mean * within, weight + within
    return total / weight if weight else None


def apart(a: Json, b: Json) -> str:
    """Why there is nothing to compare step by step, for a person."""
    return f"no step in common, so no loss side by side: {_told(a)}, {_told(b)}"


def _told(entry: Json) -> str:
    span = made(entry)
    if span is not None:
        return f"{entry['id']} made {span}"
    seen = entry.get("curves") is not None
    return f"{entry['id']} made none" if seen else f"the steps of {entry['id']} are not remembered"
