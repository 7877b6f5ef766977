"""Curves of several runs: what is drawn in text, what is written as a picture, what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller import braille, curves, figure, history, plot
from controller.console import Console
from controller.curves import Line, Panel
from controller.errors import PreflightFailed, Usage
from controller.history import History
from controller.inventory import Box

LAB = Box(name="lab", host="pve1", vmid=201, recipe="qwen")


def entry(number: int, rate: float) -> dict[str, Any]:
    steps = list(range(5, 605, 5))
    return {
        "id": f"r-{number:04d}",
        "record": {"created": 1000.0},
        "curves": {
            "steps": steps,
            "times": [1000.0 + 30 * step / rate for step in steps],
            "loss": [3 + 9 * math.exp(-step / (100 * rate)) for step in steps],
            "tokens_per_s": [None] + [1000 * rate + step / 10 for step in steps[1:]],
            "busy": {"target-0": [0.95] * 120, "drafter-0": [0.4] * 120, "drafter-1": [0.6] * 120},
        },
        "evaluations": [
            {"step": step, "time": 1000.0 + step, "tau": 1 + rate * step / 600} for step in (200, 400, 600)
        ],
    }


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(1, 1.0), entry(2, 1.3)]
    monkeypatch.setattr(history, "look", lambda *args, **options: History(entries, 5000.0, 2))
    monkeypatch.setenv("COLUMNS", "100")


def test_two_runs_in_the_terminal(two: None, golden: Callable[[str, str], None]) -> None:
    text = plot.run(LAB, Console(), runs="r-0001,r-0002").text
    golden("screens/plot.txt", text)
    assert all(len(line) <= 100 for line in text.splitlines())
    timed = plot.run(LAB, Console(), runs="r-0001 r-0002", over="time").text.splitlines()
    assert timed[-1].split("└")[1].split("  ")[0] == "1m 55s"
    assert timed[-1].endswith("  5h 00m since the start")


@pytest.mark.parametrize("kind", figure.KINDS)
def test_a_picture_is_written(two: None, tmp_path: Path, kind: str) -> None:
    out = tmp_path / f"runs.{kind}"
    done = plot.run(LAB, Console(), runs="r-0001,r-0002", out=str(out))
    assert done.text == f"wrote {out}: r-0001, r-0002"
    assert out.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    assert out.stat().st_size > 10_000


def labels(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_no_legend_covers_a_curve() -> None:
    """Each stands outside of every panel, whatever the curves are."""
    drawn = figure.drawn([entry(number, 1 + number / 10) for number in range(1, 5)])
    drawn.draw_without_rendering()
    runs, strokes = drawn.legends
    assert labels(runs) == ["r-0001", "r-0002", "r-0003", "r-0004"]
    assert labels(strokes) == ["busy: target", "busy: drafter"]
    for legend in drawn.legends:
        assert not any(axes.get_legend() for axes in drawn.axes)
        assert not any(legend.get_window_extent().overlaps(axes.bbox) for axes in drawn.axes)
    marks = {(line.get_color(), line.get_marker()) for line in runs.get_lines()}
    assert len({mark for _, mark in marks}) == 4  # not by colour alone


@pytest.mark.parametrize(
    ("lasts_s", "name", "last"),
    [
        (45, "seconds", 45),
        (179, "seconds", 179),
        (600, "minutes", 10),
        (9000, "minutes", 150),
        (36_000, "hours", 10),
        (864_000, "days", 10),
    ],
)
def test_time_is_in_units_that_suit_the_run(lasts_s: int, name: str, last: float) -> None:
    run = entry(1, 1.0)
    run["curves"]["times"] = [1000.0 + lasts_s * (at + 1) / 120 for at in range(120)]
    run["evaluations"] = []
    grid = figure.drawn([run]).axes
    assert grid[-1].get_xlabel() == f"{name} since the run began" and grid[-2].get_xlabel() == "step"
    assert grid[1].get_lines()[0].get_xdata()[-1] == pytest.approx(last)


def test_the_steps_of_a_long_run_and_its_rate_are_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    run = entry(1, 16.0)
    run["curves"]["steps"] = [1000 * step + 5 for step in range(1, 121)]
    monkeypatch.setattr(history, "look", lambda *args, **options: History([run], 5000.0, 1))
    text = plot.run(LAB, Console(), runs="r-0001").text
    assert " 120005 step" in text and "   16060 ┤" in text
    assert {row.index("┤") for row in text.splitlines() if "┤" in row} == {9}


def test_every_line_has_its_label_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [entry(number, 1.0) for number in range(1, 8)]  # fourteen lines in the last panel
    monkeypatch.setattr(history, "look", lambda *args, **options: History(many, 5000.0, 7))
    text = plot.run(LAB, Console(), runs=",".join(each["id"] for each in many)).text
    for kind in ("target", "drafter"):
        assert [run for run in many if f"{run['id']} {kind}" not in text] == []


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    rising = Panel("up", "", (Line("r-1", "", ((0, 0.0), (10, 10.0))),))
    rows = braille.stacked([rising], width=40, height=5, x_name="step", x_text=str)[1:6]
    first = [min(at for at, letter in enumerate(row) if "\u2800" < letter <= "\u28ff") for row in rows]
    assert first == sorted(first, reverse=True)
    assert rows[0].endswith("r-1")
    assert rows[0].lstrip().startswith("10 ") and rows[-1].lstrip().startswith("0 ")


def test_lines_that_end_together_keep_their_labels() -> None:
    same = tuple(Line(f"r-{number}", "", ((0, 1.0), (5, 2.0))) for number in range(3))
    text = "\n".join(braille.stacked([Panel("x", "", same)], width=60, height=6, x_name="step", x_text=str))
    assert all(f"r-{number}" in text for number in range(3))


def test_a_flat_line_and_a_single_point_are_no_accident() -> None:
    for points in (((1, 2.0),), ((1, 2.0), (2, 2.0))):
        panel = Panel("x", "", (Line("r", "", points),))
        assert braille.stacked([panel], width=60, height=4, x_name="step", x_text=str)


def test_threads_of_a_kind_are_one_line() -> None:
    busy = curves.panels([entry(1, 1.0)], "step")[-1]
    assert {line.kind: line.points[0][1] for line in busy.lines} == {"target": 95, "drafter": 50}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": "runs.xls"}, "no picture that can be written"),
        ({"out": "/nowhere/runs.png"}, "there is no folder /nowhere"),
        ({"over": "epoch"}, "one of: step, time|no axis"),
    ],
)
def test_what_cannot_be_drawn_is_said_before_anybody_is_asked(options: dict[str, str], words: str) -> None:
    with pytest.raises(Usage, match=words):
        plot.plan(LAB, runs="r-0001", **options)


def test_without_matplotlib_the_mend_is_said(
    two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PreflightFailed) as raised:
        plot.run(LAB, Console(), runs="r-0001", out=str(tmp_path / "x.png"))
    assert raised.value.hint == "pip install 'pctrun[plot]'"


def test_a_run_without_a_step_has_nothing_to_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = {"id": "r-0001", "record": {"created": 1.0}, "curves": {"steps": []}, "evaluations": []}
    monkeypatch.setattr(history, "look", lambda *args, **options: History([empty], 2.0, 1))
    assert "nothing to plot" in plot.run(LAB, Console(), runs="r-0001").text
    with pytest.raises(Usage, match="nothing to plot"):
        plot.run(LAB, Console(), runs="r-0001", out=str(tmp_path / "x.png"))
