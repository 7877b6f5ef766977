"""The same curves as a picture: one row a panel, over steps on the left and over time on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controller.curves import AXES, Line, Panel, panels
from controller.errors import PreflightFailed, Usage

Json = dict[str, Any]

KINDS = ("png", "svg", "pdf")
_MARKS = "os^Dv<>pPX*"  # eleven, and ten colours: a hundred and ten runs before two look alike
_MARKED = 12  # points of a curve that carry its mark
_STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0), ("days", 86400.0))
_ENOUGH = 3  # of the next unit, before an axis is told in it
_COLUMNS = 8  # of the legend


def check(out: Path) -> None:
    """Refuse what cannot be written before anybody is asked for data."""
    if out.suffix.removeprefix(".") not in KINDS:
        raise Usage(f"--out {out} is no picture that can be written", f"end it in .{', .'.join(KINDS)}")
    if not out.resolve().parent.is_dir():
        raise Usage(f"there is no folder {out.resolve().parent}", "make it, or name another with --out")


def write(entries: Sequence[Json], out: Path) -> None:
    """Write the picture to `out`; raises PreflightFailed without matplotlib, Usage without a step."""
    try:
        drawn(entries).savefig(out)
    except OSError as error:
        raise Usage(f"{out} cannot be written: {error.strerror or error}") from None


def drawn(entries: Sequence[Json]) -> Any:
    """Matplotlib's figure."""
    try:
        from matplotlib.figure import Figure  # half a second: only who wants a picture pays for it
        from matplotlib.lines import Line2D
    except ImportError:
        raise PreflightFailed(
            "a picture needs matplotlib, which is not installed", "pip install 'pctrun[plot]'"
        ) from None
    columns = [panels(entries, axis) for axis in AXES]
    names = [panel.name for panel in columns[0]]
    if not names:
        raise Usage("there is nothing to plot yet: no step was made", "invoke status")
    figure = Figure(figsize=(12, 2.8 * len(names)), dpi=120, layout="constrained")
    grid = figure.subplots(len(names), len(AXES), squeeze=False, sharex="col")
    looks: dict[str, Json] = {
        entry["id"]: {"color": f"C{number % 10}", "marker": _MARKS[number % len(_MARKS)], "markersize": 4}
        for number, entry in enumerate(entries)
    }
    for column, (axis, shown) in enumerate(zip(AXES, columns, strict=True)):
        x_name, x_unit = _x_axis(axis, shown)
        for row, name in enumerate(names):
            axes = grid[row][column]
            panel = next((each for each in shown if each.name == name), None)
            for line in panel.lines if panel else ():
                _plot(axes, line, x_unit, looks[line.run], _style(panel.lines, line) if panel else "-")
            unit = f" ({panel.unit})" if panel and panel.unit else ""
            axes.set_ylabel(f"{name}{unit}")
            axes.grid(alpha=0.3)
            if row == len(names) - 1:
                axes.set_xlabel(x_name)
        if axis == "step":
            axes.xaxis.get_major_locator().set_params(integer=True)  # there is no step 1.5
    runs = [Line2D([], [], label=run, **look) for run, look in looks.items()]
    strokes = [
        Line2D([], [], color="black", linestyle=_style(panel.lines, line), label=f"{panel.name}: {line.kind}")
        for panel in columns[0]
        for line in {each.kind: each for each in panel.lines if each.kind}.values()
    ]
    # Around the panels, not in them: there is no corner that no run's curve crosses.
    _legend(figure, "outside upper center", runs)
    _legend(figure, "outside lower center", strokes)
    return figure


def _x_axis(axis: str, shown: Sequence[Panel]) -> tuple[str, float]:
    """Its name, and what one of its units is: a short run's hours would have four decimals."""
    if axis == "step":
        return "step", 1.0
    longest = max((x for panel in shown for line in panel.lines for x, _ in line.points), default=0.0)
    name, seconds = next((each for each in reversed(_UNITS) if longest >= _ENOUGH * each[1]), _UNITS[0])
    return f"{name} since the run began", seconds


def _legend(figure: Any, place: str, handles: Sequence[Any]) -> None:
    if handles:
        figure.legend(handles=handles, loc=place, ncols=min(_COLUMNS, len(handles)), fontsize="small")


def _plot(axes: Any, line: Line, x_unit: float, look: Json, style: str) -> None:
    xs, ys = [x / x_unit for x, _ in line.points], [y for _, y in line.points]
    every = max(1, len(xs) // _MARKED)
    axes.plot(xs, ys, linestyle=style, markevery=every, linewidth=1.2, **look)


def _style(lines: Sequence[Line], line: Line) -> Any:
    """Colour and mark tell runs apart, the stroke tells the kinds of one run apart."""
    kinds = list(dict.fromkeys(each.kind for each in lines))
    return _STYLES[kinds.index(line.kind) % len(_STYLES)]
