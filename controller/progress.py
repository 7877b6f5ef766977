"""How far and how fast, from steady steps only: one compile mixed into a rate makes a week out of an hour."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

WINDOW = 50  # steady steps that a rate looks back on


@dataclass(frozen=True)
class Progress:
    """Tokens (real ones) per second, median seconds a step, seconds to the end; None until steady."""

    step: int
    steps: int
    steady_steps: int
    tokens_per_s: float | None
    step_s: float | None
    eta_s: float | None
    loss: float | None
    tau: float | None

    @property
    def share(self) -> float | None:
        return self.step / self.steps if self.steps else None


def of(run: dict[str, Any]) -> Progress:
    """The figures of a snapshot's `run`: its state, and its newest metrics lines without `compile: true`."""
    state: dict[str, Any] = run.get("state") or {}
    metrics: list[dict[str, Any]] = run.get("metrics") or []
    steady = [line for line in metrics if not line.get("compile") and line.get("step_s")][-WINDOW:]
    seconds = sum(line["step_s"] for line in steady)
    source: dict[str, Any] = (run.get("record") or {}).get("resume_from") or {}
    # A resumed run that still loads says step 0: it has the steps that it stands on.
    step = int(state.get("step") or (metrics[-1]["step"] if metrics else source.get("step") or 0))
    steps = int(state.get("steps") or 0)
    losses = [line["loss"] for line in metrics if line.get("loss") is not None]
    taus = [line["tau"] for line in metrics if line.get("tau") is not None]
    return Progress(
        step=step,
        steps=steps,
        steady_steps=len(steady),
        tokens_per_s=sum(line.get("tokens") or 0 for line in steady) / seconds if steady else None,
        step_s=statistics.median(line["step_s"] for line in steady) if steady else None,
        eta_s=max(0, steps - step) * seconds / len(steady) if steady and steps else None,
        loss=state["loss"] if state.get("loss") is not None else (losses[-1] if losses else None),
        tau=state["tau"] if state.get("tau") is not None else (taus[-1] if taus else None),
    )
