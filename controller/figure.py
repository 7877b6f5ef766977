"""The same curves as a picture: one row a panel, over steps on the left and over hours on the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controller.curves import AXES, Line, panels
from controller.errors import PreflightFailed, Usage

Json = dict[str, Any]

KINDS = ("png", "svg", "pdf")
_STYLES = ("-", "--", ":", "-.")
_NAMES = {"step": "step", "time": "hours since the start"}


def check(out: Path) -> None:
    """Refuse what cannot be written before anybody is asked for data."""
    if out.suffix.removeprefix(".") not in KINDS:
        raise Usage(f"--out {out} is no picture that can be written", f"end it in .{', .'.join(KINDS)}")
    if not out.resolve().parent.is_dir():
        raise Usage(f"there is no folder {out.resolve().parent}", "make it, or name another with --out")


def write(entries: Sequence[Json], out: Path) -> None:
    """Write the picture to `out`; raises PreflightFailed without matplotlib."""
    try:
        from matplotlib.figure import Figure  # half a second: only who wants a picture pays for it
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
    colours = {entry["id"]: f"C{number % 10}" for number, entry in enumerate(entries)}
    for column, (axis, shown) in enumerate(zip(AXES, columns, strict=True)):
        for row, name in enumerate(names):
            axes = grid[row][column]
            panel = next((each for each in shown if each.name == name), None)
            for line in panel.lines if panel else ():
                _plot(axes, line, colours[line.run], _style(panel.lines, line) if panel else "-")
            unit = f" ({panel.unit})" if panel and panel.unit else ""
            axes.set_ylabel(f"{name}{unit}")
            axes.grid(alpha=0.3)
            if row == len(names) - 1:
                axes.set_xlabel(_NAMES[axis])
            if column == 0 and panel:
                axes.legend(fontsize="small")
    try:
        figure.savefig(out)
    except OSError as error:
        raise Usage(f"{out} cannot be written: {error.strerror or error}") from None


def _plot(axes: Any, line: Line, colour: str, style: str) -> None:
    xs, ys = zip(*line.points, strict=True)
    marker = "o" if len(xs) <= 30 else None
    axes.plot(
        xs, ys, color=colour, linestyle=style, marker=marker, markersize=3, label=line.label, linewidth=1.2
    )


def _style(lines: Sequence[Line], line: Line) -> str:
    """Colour tells runs apart, the stroke tells the kinds of one run apart."""
    kinds = list(dict.fromkeys(each.kind for each in lines))
    return _STYLES[kinds.index(line.kind) % len(_STYLES)]
