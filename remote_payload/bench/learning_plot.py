"""The curves of a learning run as one picture: whether a drafter learns is seen at a glance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INK, GRID, BACKGROUND = "#1f2933", "#d9dee3", "#ffffff"  # opaque: readable on a dark page as well
COLOURS = ("#1565c0", "#c75000", "#2e7d32")
SMOOTHING = 0.9  # of the running mean that is drawn over the single steps
NAMES = ("loss (weighted cross-entropy)", "accuracy of the first draft slot", "τ (tokens per cycle)")


@dataclass(frozen=True)
class Curve:
    """A run's metrics.jsonl and the tau after its last step, which that file does not hold."""

    metrics: Path
    final_tau: float | None

    def read(self) -> list[dict[str, Any]]:
        steps = [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]
        if self.final_tau is not None:
            steps[-1] = {**steps[-1], "tau": self.final_tau}
        return steps


def draw(curves: dict[str, Curve], title: str, out: Path, *, loop: float | None) -> None:
    """Loss, first-slot accuracy and held-out tau of every run against steps and minutes; `loop` is the tau of
    the independent loop at the end of the first run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
    with pyplot.rc_context({**style, "axes.labelcolor": INK, "font.size": 10}):
        figure, axes = pyplot.subplots(3, 2, figsize=(11, 9), sharex="col", sharey="row")
        figure.set_facecolor(BACKGROUND)
        for number, (label, curve) in enumerate(curves.items()):
            _add(axes, curve.read(), label, COLOURS[number % len(COLOURS)], loop if number == 0 else None)
        for row, name in enumerate(NAMES):
            axes[row][0].set_ylabel(name)
        axes[2][0].set_xlabel("step")
        axes[2][1].set_xlabel("minutes of training, evaluations included")
        for axis in axes.flat:
            axis.set_facecolor(BACKGROUND)
            axis.grid(color=GRID, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        axes[2][0].legend(loc="lower right", frameon=False)
        figure.suptitle(title)
        figure.tight_layout()
        aside = out.with_name(f".{out.name}")  # a run that is cut off leaves no half a picture
        figure.savefig(aside, dpi=130, facecolor=BACKGROUND, format="png")
        aside.replace(out)
        pyplot.close(figure)


def _add(axes: Any, steps: list[dict[str, Any]], label: str, colour: str, loop: float | None) -> None:
    scales = (
        [step["step"] for step in steps],
        [(step["time"] - steps[0]["time"]) / 60 for step in steps],
    )
    measured = [index for index, step in enumerate(steps) if step.get("tau") is not None]
    lines = ([step["loss"] for step in steps], [step["accuracy"][0] for step in steps])
    for column, x in enumerate(scales):
        for row, values in enumerate(lines):
            axes[row][column].plot(x, values, color=colour, alpha=0.2, linewidth=0.8)
            axes[row][column].plot(x, _smooth(values), color=colour, linewidth=1.8)
        taus = [steps[index]["tau"] for index in measured]
        at = [x[index] for index in measured]
        axes[2][column].plot(at, taus, "o-", color=colour, markersize=4, label=f"trainer, {label}")
        if loop is not None:
            axes[2][column].plot(x[-1:], [loop], "x", color=INK, markersize=9, label="greedy loop")


def _smooth(values: list[float]) -> list[float]:
    """Running mean, unbiased at its start."""
    mean = weight = 0.0
    smooth = []
    for value in values:
        mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * value, SMOOTHING * weight + 1 - SMOOTHING
        smooth.append(mean / weight)
    return smooth
