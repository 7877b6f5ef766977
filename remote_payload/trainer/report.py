"""The step line: what a person who reads the log wants to know, always in the same columns."""

from __future__ import annotations

from trainer.pipeline import StepResult

HEADER_EVERY = 20  # steps: a screenful of log shows what its columns are
HEADER = "      step            loss    acc       lr     tok/s      dt   left"


def step_line(result: StepResult, steps: int, tokens_per_s: float | None, step_time_s: float | None) -> str:
    """`120/400  30.0%  4.1234  0.312  5.9e-04  1,234  0.42s  2m 03s`; acc is the first draft slot's."""
    left = "after warm-up" if step_time_s is None else duration((steps - result.steps_done) * step_time_s)
    rate = "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
    done = result.steps_done
    return (
        f"{done:6d}/{steps} {done / steps:6.1%}  {result.loss:8.4f}  {result.accuracy[0]:.3f}"
        f"  {result.lr:.1e}  {rate:>8}  {result.step_s:5.2f}s  {left}"
    )


def duration(seconds: float) -> str:
    """42s, 3m 20s, 5h 12m, 3d 4h: as `status` writes it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"
