"""What happens inside a trainer, or to it: the real one on a tiny target, under the real supervisor."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.agent.conftest import Box, make_box, remove_box

from . import training
from .looks import look
from .table import fault


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    made = make_box()
    try:
        training.deploy(made)
        yield made
    finally:
        remove_box(made)


@pytest.fixture(autouse=True)
def _nothing_is_left(box: Box) -> Iterator[None]:
    yield
    training.fault(box, "")
    box.call("stop", grace_s=10.0)


@fault(
    "an exception in the loader's, a target's or a drafter's thread",
    promised="all threads end; the thread and the exception are named, the last checkpoint is resumed",
    seen="`crashed`, exit 4: `thread {thread} failed: RuntimeError: a fault that was made`",
)
@pytest.mark.parametrize("thread", ["loader", "target-0", "drafter-0"])
def test_an_exception_in_a_thread(box: Box, thread: str) -> None:
    run = training.start(box, resume="none")
    box.wait_for(lambda: look(box).run["checkpoints"], "a checkpoint")
    training.fault(box, f"{thread} raise")
    box.wait_for(lambda: (box.run_dir(run) / "exit.json").exists(), "its end")
    seen = look(box)
    assert (seen.word, seen.exit_code) == ("crashed", 4)
    screen = " ".join(seen.screen.split())  # a long reason is wrapped
    assert f"thread {thread} failed: RuntimeError: a fault that was made" in screen
    assert seen.run["processes"] == []
    step = seen.run["state"]["step"]
    assert step - 5 <= seen.run["checkpoints"][-1]["step"] <= step
