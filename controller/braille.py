"""Curves in a terminal that shows only text: eight dots a character, a label where each line ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controller.curves import Panel, Point

_BASE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column of two][row of four]
_AXIS = 9  # columns left of the plot


def stacked(
    panels: Sequence[Panel], *, width: int, height: int, x_name: str, x_text: Callable[[float], str]
) -> list[str]:
    """Panels of `height` rows, more where more lines want a label, below each other over one x axis, whose
    ends `x_text` writes; each line is at most `width` columns.
    """
    lines = [line for panel in panels for line in panel.lines]
    columns = max(10, width - _AXIS - 2 - max(len(line.label) for line in lines))
    span = _span([x for line in lines for x, _ in line.points])
    left, right = x_text(span[0]), f"{x_text(span[1])} {x_name}"
    foot = " " * _AXIS + "└" + left + right.rjust(columns - len(left))
    return [
        row
        for panel in panels
        for row in (*_panel(panel, columns, max(height, len(panel.lines)), span), foot)
    ]


def _panel(shown: Panel, columns: int, height: int, span: Point) -> list[str]:
    """A title and `height` rows of plot."""
    low_x, high_x = span
    low_y, high_y = _span([y for line in shown.lines for _, y in line.points])
    grid = [[0] * columns for _ in range(height)]
    ends: dict[int, str] = {}
    for line in shown.lines:
        dots = [
            (
                _scaled(x, low_x, high_x, 2 * columns - 1),
                4 * height - 1 - _scaled(y, low_y, high_y, 4 * height - 1),
            )
            for x, y in line.points
        ]
        _draw(grid, dots)
        ends[_free(ends, dots[-1][1] // 4, height)] = line.label
    marks = {0: high_y, height // 2: (low_y + high_y) / 2, height - 1: low_y}
    rows = [f"{shown.name}{f', {shown.unit}' if shown.unit else ''}"]
    for row, cells in enumerate(grid):
        mark = _mark(marks[row]) if row in marks else ""
        drawn = "".join(chr(_BASE + bits) if bits else " " for bits in cells)
        rows.append(f"{mark:>{_AXIS - 1}} ┤{drawn} {ends.get(row, '')}".rstrip())
    return rows


def _mark(value: float) -> str:
    """What fits left of the axis: a rate of five digits is whole, not 1.626e+04."""
    text = f"{value:.0f}" if abs(value) >= 1e3 else f"{value:.4g}"
    return text if len(text) < _AXIS else f"{value:.2g}"


def _draw(grid: list[list[int]], dots: Sequence[tuple[int, int]]) -> None:
    """Dots, joined by straight lines."""
    previous = dots[0]
    for x, y in dots:
        steps = max(abs(x - previous[0]), abs(y - previous[1]), 1)
        for step in range(steps + 1):
            at_x = previous[0] + round((x - previous[0]) * step / steps)
            at_y = previous[1] + round((y - previous[1]) * step / steps)
            grid[at_y // 4][at_x // 2] |= _DOTS[at_x % 2][at_y % 4]
        previous = (x, y)


def _free(taken: dict[int, str], row: int, height: int) -> int:
    """The row nearest to `row` that holds no label yet."""
    return min((each for each in range(height) if each not in taken), key=lambda each: abs(each - row))


def _span(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _scaled(value: float, low: float, high: float, most: int) -> int:
    return round((value - low) / (high - low) * most)
