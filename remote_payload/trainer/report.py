"""The step line: what a person who reads the log wants to know, always in the same columns."""

from __future__ import annotations

from trainer.pipeline import StepResult

HEADER = "      step              loss    acc       lr     tok/s      dt   left"


def step_line(result: StepResult, steps: int, tokens_per_s: float | None, step_time_s: float | None) -> str:
    """`step 00120/00400  30.0 %  4.1234  0.312  5.9e-04  1,234  0.42 s  2 min 3 s`; acc is the first draft
    slot's."""
    left = "after warm-up" if step_time_s is None else duration((steps - result.steps_done) * step_time_s)
    rate = "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
    done = result.steps_done
    return (
        f"{done:6d}/{steps} {done / steps:6.1%}  {result.loss:8.4f}  {result.accuracy[0]:.3f}"
        f"  {result.lr:.1e}  {rate:>8}  {result.step_s:5.2f}s  {left}"
    )


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 5 h 12 min, 3 d 4 h."""
    whole = round(seconds)
    for size, name, small, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // small} {small_name}"
    return f"{whole} s"
