"""What happens inside a trainer, or to it: the real one on a tiny target, under the real supervisor."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.conftest import Box, make_box, remove_box

from . import training
from .looks import Look, look
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
    seen="`crashed`, exit 4: the thread and `failed: RuntimeError: a fault that was made`",
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


@fault(
    "a thread of the trainer hangs: loader, target, drafter, or one that keeps the interpreter's lock",
    promised="the log names the thread, what it is at and its stack; a minute without a step is `stalled`",
    seen="`stalled`, exit 3, the thread and `in hangs`; with the lock kept `Timeout (0:00:03)!`",
)
def test_a_hang_in_each_kind_of_thread_is_told_with_its_stack(box: Box) -> None:
    run = training.start(box, resume="none")
    for thread, doing in (
        ("loader", "packing row"),
        ("target-0", "features of row"),
        ("drafter-0", "backward of row"),
    ):
        training.fault(box, f"{thread} hang")
        line = re.compile(rf"^  {thread}: {doing} \d+, for \d+ s$", re.M)
        box.wait_for(lambda line=line: line.search(last_report(box, run)), "the watchdog names the thread")
        stack = re.compile(rf"stack of {thread}, innermost call last:\n(?s:.*)in hangs\b")
        box.wait_for(lambda stack=stack: stack.search(last_report(box, run)), "its stack")
        later = look(box, later_s=61)
        assert (later.word, later.exit_code) == ("stalled", 3)
        assert later.causes[:2] == ("stalled", "hung-thread")
        assert f"{thread}: {doing}" in later.screen
        done = training.steps(box, run)
        training.fault(box, "")
        box.wait_for(lambda n=done: training.steps(box, run) > n + 1, "the next steps")
        assert look(box).word in ("healthy", "warming-up")
    training.fault(box, "drafter hold")
    timeout = "Timeout (0:00:03)!"
    box.wait_for(lambda: "in holds" in training.log(box, run).rpartition(timeout)[2], "the timer's report")


def last_report(box: Box, run: str) -> str:
    """What the watchdog has said last."""
    return training.log(box, run).rpartition("no thread has moved for")[2]


@fault(
    "SIGTERM to the trainer, from somebody else than pctrun",
    promised="the step is finished, a checkpoint is written, nobody is named who was not there",
    seen="`stopped`, exit 5, `asked to stop by SIGTERM, by nobody on record`",
)
@fault(
    "the container's clock is set, an hour forward or back, in mid-run",
    promised="no age, no stall and no silence comes of it",
    seen="`healthy` within two seconds, for as long as it is",
)
def test_a_clock_that_is_set_and_then_a_signal_from_outside(box: Box) -> None:
    run = training.start(box, resume="none")
    box.wait_for(lambda: look(box).word == "healthy", "a steady step")
    own = box.python
    box.python = shifted_python(box)
    for offset in (3600, -3600):
        (Path(box.roots["lib"]) / "clock").write_text(str(offset))
        box.wait_for(lambda: look(box).word == "healthy", "the look after the clock was set")
        seen = look(box)
        assert seen.causes == ()
        assert re.search(r"HEALTHY for (\d+s|[2-9]m) ", seen.screen), seen.screen
    (Path(box.roots["lib"]) / "clock").unlink()
    box.python = own
    trainer = next(each for each in look(box).run["processes"] if each["role"] == "trainer")
    os.kill(trainer["pid"], signal.SIGTERM)
    box.wait_for(lambda: (box.run_dir(run) / "exit.json").exists(), "its end")
    seen = look(box)
    assert (seen.word, seen.exit_code) == ("stopped", 5)
    assert "asked to stop by SIGTERM, by nobody on record" in seen.screen
    assert seen.run["checkpoints"][-1]["step"] == training.steps(box, run), "no step is lost"


def shifted_python(box: Box) -> str:
    """An interpreter for the agent that reads the same set clock as the trainer."""
    made = box.base / "shifted"
    made.write_text(
        f"#!{sys.executable} -I\n"
        "import sys, time\n"
        "honest = time.time\n"
        f"time.time = lambda: honest() + float(open({box.roots['lib'] + '/clock'!r}).read())\n"
        "exec(compile(sys.argv[3], 'agent', 'exec'))\n"
    )
    made.chmod(0o755)
    return str(made)


@fault(
    "one bit of a checkpoint's weights flips on the disk",
    promised="the checkpoint before it is resumed, and every status of the run says so",
    seen="`is damaged (model.safetensors: its checksum differs)`, `resumed at step`",
    part="files",
)
@fault(
    "every checkpoint of a run is damaged",
    promised="no training on damaged weights and no silent start from nothing: a refusal with the mend",
    seen="`crashed`, exit 4: `is whole, step-`, `start again with --from-scratch`",
    part="files",
)
def test_a_flipped_bit_in_the_weights(box: Box) -> None:
    run = training.start(box, resume="none")
    box.wait_for(lambda: len(look(box).run["checkpoints"]) >= 2, "two checkpoints")
    box.call("stop")
    older, newest = (Path(each["path"]) for each in look(box).run["checkpoints"][-2:])
    flip(newest / "model.safetensors")
    again = training.start(box)
    seen = look(box)
    assert seen.run["record"]["resume_from"]["path"] == str(newest)
    first = json.loads((box.run_dir(again) / "metrics.jsonl").read_text().partition("\n")[0])
    assert first["step"] == step_of(older) + 1
    screen = " ".join(seen.screen.split())
    assert f"resumed at step {step_of(older)} instead" in screen
    assert f"{newest.name} is damaged (model.safetensors: its checksum differs)" in screen
    box.call("stop")
    for path in (
        *box.run_dir(run).glob("checkpoints/step-*"),
        *box.run_dir(again).glob("checkpoints/step-*"),
    ):
        flip(path / "optimizer.safetensors")
    run = box.call("start", recipe="tiny", overrides=training.LONG, python=box.python).result["run"]
    box.wait_for(lambda: (box.run_dir(run) / "exit.json").exists(), "its end", 120)
    seen = look(box)
    assert (seen.word, seen.exit_code, seen.causes) == ("crashed", 4, ("refused",))
    screen = " ".join(seen.screen.split())
    assert f"no checkpoint of {again} is whole, step-" in screen
    assert "start again with --from-scratch" in screen
    assert "Traceback" not in training.log(box, run)


def flip(path: Path) -> None:
    """One bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def losses(box: Box, run: str) -> dict[int, float]:
    lines = (box.run_dir(run) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}")]
    assert [line["step"] for line in found] == list(range(1, len(found) + 1)), "each step once, in order"
    return {line["step"]: line["loss"] for line in found}


def restarting(seen: Look) -> Look | None:
    return seen if "restarting" in seen.causes else None


def trainer(seen: Look) -> int:
    return next(each["pid"] for each in seen.run["processes"] if each["role"] == "trainer")


@fault(
    "SIGKILL to the trainer of a run with `--auto-restart`",
    promised="the run goes on at its last checkpoint after a pause, no step missing or twice, each with the "
    "loss that it had; the screen says when, and then how often and why",
    seen="`degraded` with `starts again in`, then `healthy` with `restarted 1 of 2 times`",
)
def test_a_killed_trainer_is_tried_again(box: Box) -> None:
    run = training.start(box, resume="none", auto_restart=2, backoff_s=8.0)
    box.wait_for(lambda: len(look(box).run["checkpoints"]) >= 1, "a checkpoint")
    first = look(box)

    def held_beyond_it() -> bool:
        """Suspended while it is looked at: the next checkpoint must not come between."""
        os.kill(trainer(first), signal.SIGSTOP)
        if training.steps(box, run) < look(box).run["checkpoints"][-1]["step"] + 2:
            os.kill(trainer(first), signal.SIGCONT)
            return False
        return True

    box.wait_for(held_beyond_it, "steps beyond it")
    os.kill(trainer(first), signal.SIGKILL)
    seen = box.wait_for(lambda: restarting(look(box)), "the crash to be seen")
    before = losses(box, run)
    assert (seen.word, seen.exit_code) == ("degraded", 2)
    assert "starts again in" in seen.screen and "killed by SIGKILL" in seen.screen
    saved = seen.run["checkpoints"][-1]["step"]
    assert saved < max(before), "there was something to lose"
    box.wait_for(lambda: look(box).word == "healthy", "the second attempt", 120)
    box.wait_for(lambda: training.steps(box, run) > len(before), "it to come beyond the crash")
    seen = look(box)
    assert seen.word == "healthy" and "restarted 1 of 2 times" in seen.screen
    assert trainer(seen) != trainer(first) and seen.run["id"] == run
    after = losses(box, run)
    assert {step: after[step] for step in before} == before
    assert seen.run["attempts"]["crashes"][0]["resume"]["step"] == saved
    assert box.call("stop").result["outcome"] == "stopped"
