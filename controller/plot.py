"""Loss, τ, speed and who waits for whom, of one run or several over each other: drawn or as a picture."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from controller import braille, curves, history, words
from controller.console import Console
from controller.errors import Usage
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

POINTS = 600  # of a curve: more than a picture's columns show
_ROWS = 9
_LEAST, _MOST = 60, 120  # columns


def plan(box: Box, *, runs: str, out: str = "", over: str = "step") -> Plan:
    ids = _ids(runs)
    _check(out, over)
    args = history.args(ids, limit=1, detail=True, points=POINTS)
    return Plan("plot", (Step(f"ask for the curves of {', '.join(ids) or 'the newest run'}", "runs", args),))


def run(box: Box, console: Console, *, runs: str, out: str = "", over: str = "step") -> Outcome:
    """`runs`: ids with commas between, or newest. Writes `out` when given, else draws `over` an axis."""
    ids = _ids(runs)
    _check(out, over)
    found = history.look(box, ids, limit=1, detail=True, points=POINTS)
    history.tell(found, console)
    told = ("id", "curves", "evaluations")
    document: dict[str, Any] = {"runs": [{key: entry.get(key) for key in told} for entry in found.entries]}
    names = ", ".join(entry["id"] for entry in found.entries)
    if out:
        from controller import figure

        figure.write(found.entries, Path(out).expanduser())
        return Outcome({**document, "out": out}, f"wrote {out}: {names}")
    return Outcome({**document, "out": None}, _drawn(curves.panels(found.entries, over), over, names))


def _drawn(panels: list[curves.Panel], over: str, names: str) -> str:
    if not panels:
        return f"{names or 'no run yet'}: nothing to plot, no step was made"
    width = max(_LEAST, min(_MOST, shutil.get_terminal_size((100, 24)).columns))
    name, text = ("step", "{:.0f}".format) if over == "step" else ("since the start", words.duration)
    return "\n".join(braille.stacked(panels, width=width, height=_ROWS, x_name=name, x_text=text))


def _ids(runs: str) -> list[str]:
    ids = [each for each in re.split(r"[\s,]+", runs) if each]
    return [] if ids == [history.NEWEST] else list(dict.fromkeys(ids))


def _check(out: str, over: str) -> None:
    if over not in curves.AXES:
        raise Usage(f"--over {over} is no axis", f"one of: {', '.join(curves.AXES)}")
    if out:
        from controller import figure

        figure.check(Path(out).expanduser())
