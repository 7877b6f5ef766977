"""The step line keeps its columns under the header, and its times are written as `status` writes them."""

from __future__ import annotations

import pytest

from trainer.pipeline import StepResult
from trainer.report import HEADER, duration, step_line

RESULT = StepResult(
    steps_done=85,
    loss=5.6531,
    accuracy=[0.172],
    lr=1.7e-3,
    grad_norm=1.0,
    tokens=500,
    step_s=1.57,
    busy={},
    costs=None,
    last=False,
)


def test_columns_end_under_their_names() -> None:
    line = step_line(RESULT, 300, 335.2, 1.3)
    assert line == "    85/300  28.3%    5.6531  0.172  1.7e-03       335   1.57s  4m 40s"
    for name, value in (
        ("loss", "5.6531"),
        ("acc", "0.172"),
        ("lr", "1.7e-03"),
        ("tok/s", "335"),
        ("dt", "1.57s"),
    ):
        assert abs(HEADER.index(name) + len(name) - line.index(value) - len(value)) <= 1


def test_before_a_steady_step_nothing_is_promised() -> None:
    line = step_line(RESULT, 300, None, None)
    assert line.endswith("after warm-up") and " - " in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "7s"), (200, "3m 20s"), (18720, "5h 12m"), (273600, "3d 4h"), (3599.6, "1h 00m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
