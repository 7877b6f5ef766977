"""The curves of a learning run as one picture: whether a drafter learns is seen at a glance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INK, GRID, BACKGROUND = "#1f2933", "#d9dee3", "#ffffff"  # opaque: readable on a dark page as well
COLOURS = {"loss": "#b3261e", "accuracy": "#1565c0", "tau": "#2e7d32"}
SMOOTHING = 0.97  # of the running mean that is drawn over the single steps


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(
    metrics: list[dict[str, Any]], title: str, out: Path, *, final_tau: float | None, loop: float | None
) -> None:
    """Loss, first-slot accuracy and tau against steps (left) and minutes (right).

    final_tau: of the last step, which metrics.jsonl does not hold; loop: tau of the independent loop.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [m["step"] for m in metrics]
    minutes = [(m["time"] - metrics[0]["time"]) / 60 for m in metrics]
    series = {
        "loss": ("loss (weighted cross-entropy)", [m["loss"] for m in metrics]),
        "accuracy": ("accuracy of the first draft slot", [m["accuracy"][0] for m in metrics]),
    }
    known = [i for i, m in enumerate(metrics) if m.get("tau") is not None]
    taus = [metrics[i]["tau"] for i in known]
    if final_tau is not None:
        known, taus = [*known, len(metrics) - 1], [*taus, final_tau]
    with pyplot.rc_context(
        {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 10}
    ):
        figure, axes = pyplot.subplots(
            3, 2, figsize=(11, 9), sharex="col", sharey="row", facecolor=BACKGROUND
        )
        for column, (x, label) in enumerate(((steps, "step"), (minutes, "minutes of training"))):
            for row, (name, (text, values)) in enumerate(series.items()):
                axis = axes[row][column]
                axis.plot(x, values, color=COLOURS[name], alpha=0.25, linewidth=0.8)
                axis.plot(x, _smooth(values), color=COLOURS[name], linewidth=1.8)
                axis.set_ylabel(text if column == 0 else "")
            axis = axes[2][column]
            axis.plot(
                [x[i] for i in known], taus, color=COLOURS["tau"], marker="o", label="trainer, held-out"
            )
            if loop is not None:
                axis.plot(
                    [x[-1]], [loop], color=INK, marker="x", linestyle="", markersize=9, label="greedy loop"
                )
            axis.set_ylabel("τ (tokens per cycle)" if column == 0 else "")
            axis.set_xlabel(label)
            axis.legend(loc="lower right", frameon=False)
        for axis in axes.flat:
            axis.set_facecolor(BACKGROUND)
            axis.grid(color=GRID, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(out, dpi=130, facecolor=BACKGROUND)
        pyplot.close(figure)


def _smooth(values: list[float]) -> list[float]:
    """Running mean, unbiased at its start."""
    mean = weight = 0.0
    smooth = []
    for value in values:
        mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * value, SMOOTHING * weight + 1 - SMOOTHING
        smooth.append(mean / weight)
    return smooth
