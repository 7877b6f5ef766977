"""A curve in one line of text: enough to see a trend, a plateau, a collapse."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"

Point = tuple[float, float]


def line(points: Sequence[Point], width: int) -> str:
    """At most `width` characters over the points' x: each is the mean of what lies in its share, a gap where
    nothing does. Empty without points.

    >>> line([(0, 1.0), (1, 2.0), (2, 3.0)], 3)
    '▁▅█'
    """
    if not points or width < 1:
        return ""
    first, last = points[0][0], points[-1][0]
    width = min(width, len(points))
    sums, counts = [0.0] * width, [0] * width
    for x, y in points:
        place = min(width - 1, int((x - first) / (last - first) * width)) if last > first else 0
        sums[place] += y
        counts[place] += 1
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    known = [mean for mean in means if mean is not None]
    low, span = min(known), max(known) - min(known)
    return "".join(" " if mean is None else _bar((mean - low) / span if span else 0.5) for mean in means)


def _bar(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
