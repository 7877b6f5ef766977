"""How far and how fast, from steady steps only: one compile mixed into a rate makes a week out of an hour."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from controller import attempts

WINDOW = 50  # steady steps that a rate looks back on
ETA_AFTER = 3  # steady steps: one or two are no forecast


@dataclass(frozen=True)
class Progress:
    """Tokens (real ones) per second, median seconds a step, seconds to the last one; None until steady.

    `steady_steps` of the last WINDOW neither compiled nor filled the queues, as a run's first step does.
    """

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
    """The figures of a snapshot's `run`: its last attempt's state, and the newest of its steady steps."""
    state = attempts.state(run)
    began, own = attempts.steps(run)
    steady = [] if attempts.between(run) else _steady(run)
    seconds = sum(line["step_s"] for line in steady)
    # An attempt that still loads says step 0: it has the steps that it stands on.
    step = int(state.get("step") or (own[-1]["step"] if own else began))
    steps = int(state.get("steps") or 0)
    kept = attempts.kept(run)
    losses = [line["loss"] for line in kept if line.get("loss") is not None]
    taus = [line["tau"] for line in kept if line.get("tau") is not None]
    return Progress(
        step=step,
        steps=steps,
        steady_steps=len(steady),
        tokens_per_s=sum(line.get("tokens") or 0 for line in steady) / seconds if steady else None,
        step_s=statistics.median(line["step_s"] for line in steady) if steady else None,
        eta_s=(steps - step) * seconds / len(steady) if len(steady) >= ETA_AFTER and steps > step else None,
        loss=state["loss"] if state.get("loss") is not None else (losses[-1] if losses else None),
        tau=state["tau"] if state.get("tau") is not None else (taus[-1] if taus else None),
    )


def after_first(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The last attempt's newest metrics lines without its first, whose time is that of filling queues."""
    began, own = attempts.steps(run)
    known_before = len(own) < len(run.get("metrics") or [])
    return own[1:] if own and (known_before or own[0]["step"] == began + 1) else own


def rates(run: dict[str, Any]) -> list[float]:
    """Tokens per second of each of the last steady steps."""
    return [(line.get("tokens") or 0) / line["step_s"] for line in _steady(run)]


def _steady(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in after_first(run) if not line.get("compile") and line.get("step_s")][-WINDOW:]
