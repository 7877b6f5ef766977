"""A driver that hangs costs every command five seconds, once, whatever was started before it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent import gpu, toolkit
from agent.call import Refusal, Roots
from tests.agent.conftest import Box
from tests.agent.recorded_card import PATIENT_S, ROWS, Player, installed


@pytest.fixture
def player(box: Box, monkeypatch: pytest.MonkeyPatch) -> Player:
    return installed(box, monkeypatch)


def test_a_hung_driver_costs_five_seconds_and_is_asked_once_although_nothing_was_ever_started(
    box: Box, player: Player
) -> None:
    """After a boot there is no folder yet for the note of who asks, and that is when drivers hang."""
    player.play("idle", hangs=True)
    took: list[float] = []
    while not took or (min(took) >= 7 and len(took) < 5):  # the best: other work on the cores is not ours
        began = time.monotonic()
        found = box.call("snapshot").result["gpus"]
        took.append(time.monotonic() - began)
        assert (found["status"], found["detail"]) == ("timeout", "nvidia-smi did not answer in time")
    assert min(took) < 7, "5 s and what a look takes"
    player.play("idle", hangs=True)
    cut = box.begin("snapshot")  # a person who does not wait for its end
    ((pid, _),) = box.wait_for(player.asked, "the question", 900)
    cut.kill()
    box.collect(cut)
    try:
        for _ in range(3):
            found = box.call("snapshot", gpu_deadline_s=0.3).result["gpus"]
            assert (found["status"], found["detail"]) == ("timeout", "nvidia-smi hangs in the driver")
        assert [each for each, _ in player.asked()] == [pid], "the hung one, and no other"
        assert not Path(box.roots["run"]).exists(), "a look changes nothing"
    finally:
        os.kill(pid, signal.SIGKILL)
    player.play("idle")
    again = box.call("snapshot", gpu_deadline_s=PATIENT_S).result["gpus"]
    assert again["rows"] == [ROWS["idle"]], "it is asked again"


def test_the_age_of_a_hung_question_is_known_although_its_look_was_killed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, started = gpu.subprocess.Popen, []

    def killed(*args: object, **kwargs: object) -> None:
        started.append(honest(*args, **kwargs))
        raise KeyboardInterrupt  # the child lives, and its look does nothing any more

    monkeypatch.setattr(gpu.subprocess, "Popen", killed)
    monkeypatch.setattr(gpu, "DEADLINE_S", 0.1)
    with pytest.raises(KeyboardInterrupt):
        gpu.ask(str(tmp_path), 5.0, ("sleep", "600"))
    try:
        time.sleep(0.2)
        began = time.monotonic()
        said = gpu.reply(gpu.ask(str(tmp_path), 30.0, ("sleep", "600")))
        assert time.monotonic() - began < 20, "what is known to hang is not waited for"
        assert (said.status, said.detail) == ("timeout", "sleep hangs in the driver for 0 s")
        assert len(started) == 1
    finally:
        with started[0]:
            started[0].kill()


def test_doctor_gives_a_hung_driver_no_more_than_a_look_does(box: Box, player: Player) -> None:
    took: list[float] = []
    while not took or (min(took) >= 9 and len(took) < 5):
        player.play("idle", hangs=True)
        began = time.monotonic()
        found = box.call("doctor", python=box.python).result["gpus"]
        took.append(time.monotonic() - began)
        assert (found["status"], found["detail"]) == ("timeout", "nvidia-smi did not answer in time")
        assert len(player.asked()) == 1, "5 s altogether, not for each of several questions"
    assert min(took) < 9, "5 s and what doctor takes"


def test_the_architecture_is_asked_with_the_deadline_of_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def hung(run_root: str, deadline_s: float, argv: Sequence[str]) -> gpu.Query:
        given.append(deadline_s)
        query = gpu.Query(run_root, deadline_s, argv)
        query.known = gpu.Reply("timeout", "nvidia-smi did not answer in time")
        return query

    monkeypatch.setattr(gpu, "ask", hung)
    with pytest.raises(Refusal, match="no GPU here says its own") as refused:
        toolkit.architectures(Roots("/nowhere", "/nowhere", "/nowhere", "/nowhere"), None)
    assert refused.value.hint == "--arch 9.0" and given == [gpu.DEADLINE_S] == [5.0]
