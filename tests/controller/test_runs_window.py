"""The loss of two runs is compared over the same steps, whatever part of a training each made itself."""

from __future__ import annotations

from typing import Any

import pytest

from controller import history, runs_diff, runs_window
from controller.console import Console
from controller.history import History
from controller.inventory import Box
from controller.runs_window import Span

LAB = Box(name="lab", host="pve1", vmid=201, recipe="qwen")


def falling(run_id: str, first: int, last: int, *, row: int = 1, above: float = 0.0) -> dict[str, Any]:
    """A run whose loss at step s is 1000 - s + `above`, told in rows of `row` steps as the agent has."""
    steps = list(range(first, last + 1))
    rows = [steps[at : at + row] for at in range(0, len(steps), row)]
    curves = {
        "lines": len(steps),
        "first": first,
        "steps": [each[-1] for each in rows],
        "loss": [1000 + above - sum(each) / len(each) for each in rows],
    }
    lines = [{"step": step, "loss": 1000.0 + above - step} for step in steps[-60:]]
    return {"id": run_id, "record": {}, "state": {"step": last}, "curves": curves, "metrics": lines}


def outcome(monkeypatch: pytest.MonkeyPatch, a: dict[str, Any], b: dict[str, Any]) -> Any:
    monkeypatch.setattr(history, "look", lambda *args, **options: History([a, b], None, 2))
    return runs_diff.run(LAB, Console(), first=a["id"], second=b["id"])


def test_a_resumed_run_is_compared_over_the_steps_of_its_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same line of loss both are equal; a tenth of each one's own steps would make them differ."""
    whole, resumed = falling("r-0001", 1, 1000), falling("r-0003", 601, 1000)
    assert runs_window.shared(whole, resumed) == Span(961, 1000)
    done = outcome(monkeypatch, whole, resumed)
    assert done.document["window"] == [961, 1000]
    [row] = [each for each in done.document["outcome"] if each["name"] == "mean of steps 961–1000"]
    assert row["a"] == row["b"] == pytest.approx(1000 - 980.5) and row["change"] == 0
    assert "mean of steps 961–1000" in done.text


@pytest.mark.parametrize("row", [1, 7, 23])
def test_rows_of_many_steps_are_no_other_span(row: int) -> None:
    coarse, fine = falling("r-0001", 1, 1000, row=row), falling("r-0003", 301, 950, above=2.0)
    span = runs_window.shared(coarse, fine)
    assert span is not None and (span.first, span.last) == (886, 950)
    one, other = runs_window.loss(coarse, span), runs_window.loss(fine, span)
    assert one is not None and other == pytest.approx(1002 - 918)
    assert one == pytest.approx(1000 - 918, abs=row / 2)


def test_short_runs_are_compared_over_as_many_steps_as_a_loss_is_smoothed_over() -> None:
    assert runs_window.shared(falling("a", 1, 10), falling("b", 1, 400)) == Span(1, 10)
    assert runs_window.shared(falling("a", 1, 77), falling("b", 1, 30)) == Span(11, 30)
    only = runs_window.shared(falling("a", 1, 78), falling("b", 78, 400))
    assert only == Span(78, 78) and str(only) == "step 78"


def test_runs_without_a_step_in_common_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, resumed, dead = falling("r-0002", 1, 77), falling("r-0003", 78, 400), falling("r-0004", 1, 0)
    done = outcome(monkeypatch, stopped, resumed)
    assert done.document["window"] is None
    said = "no step in common, so no loss side by side: r-0002 made steps 1–77, r-0003 made steps 78–400"
    assert done.text.endswith(f"  {said}")
    [row] = [each for each in done.document["outcome"] if each["group"] == "loss"]
    assert row["name"] == "mean of last 20" and row["change"] is None  # of other steps: no change of the runs
    assert runs_window.apart(stopped, dead).endswith("r-0002 made steps 1–77, r-0004 made none")
    del stopped["curves"]
    assert "the steps of r-0002 are not remembered" in runs_window.apart(stopped, resumed)


def test_what_an_earlier_version_remembered_is_still_compared() -> None:
    old, new = falling("a", 1, 100, row=5), falling("b", 1, 100)
    del old["curves"]["first"]
    assert runs_window.made(old) == Span(5, 100)
    span = runs_window.shared(old, new)
    assert span == Span(81, 100)
    assert runs_window.loss(old, span) == pytest.approx(runs_window.loss(new, span))
