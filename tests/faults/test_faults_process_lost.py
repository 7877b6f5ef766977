"""What a run loses when what stands around it is gone: the tmux server, its socket, the supervisor."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import procs
from tests.agent.conftest import Box, make_box, remove_box

from .looks import look
from .table import fault


@pytest.fixture
def running() -> Iterator[tuple[Box, str]]:
    box = make_box()
    try:
        assert box.deploy().result["outcome"] == "deployed"
        run = box.start().result["run"]
        box.wait_for(lambda: box.file(run, "state.json")["step"] >= 3, "its first steps")
        yield box, run
    finally:
        remove_box(box)


def pid_of(box: Box, role: str) -> int:
    return int(next(each["pid"] for each in look(box).run["processes"] if each["role"] == role))


@fault(
    "the tmux socket, or its whole folder, is removed (a cleaner of /run)",
    promised="the run goes on without a window, the next one has one again; no server is left behind",
    seen="alive, `tmux` false, `stopped` with no step lost",
)
@pytest.mark.parametrize("what", ["socket", "folder"])
def test_the_tmux_socket_is_removed(running: tuple[Box, str], what: str) -> None:
    box, run = running
    socket = next((Path(box.roots["run"]) / "tmux").glob("tmux-*/pctrun"))
    shutil.rmtree(socket.parents[1]) if what == "folder" else socket.unlink()
    step = box.file(run, "state.json")["step"]
    box.wait_for(lambda: box.file(run, "state.json")["step"] > step + 2, "the run goes on")
    seen = look(box)
    assert seen.run["tmux"] is False
    assert {each["role"] for each in seen.run["processes"]} == {"supervisor", "trainer"}
    assert seen.word == "warming-up" and seen.causes == (), "the stand-in tells no rate"
    stopped = box.call("stop").result
    assert (stopped["outcome"], stopped["lost_steps"], stopped["survivors"]) == ("stopped", 0, [])
    assert box.scope(run) == []
    box.wait_for(lambda: not servers(box), "the end of the server that nobody can reach")
    again = box.start().result
    assert again["resume_from"]["step"] == stopped["step"]
    assert look(box).run["tmux"] is True
    box.call("stop")


@fault(
    "the tmux server is suspended",
    promised="a look waits 2 s for it and no longer, and says so; the run goes on, `abort` loses no step",
    seen="within 8 s the run's word, with `tmux does not answer`; `stopped` with no step lost",
)
def test_a_suspended_tmux_server_delays_no_look(running: tuple[Box, str]) -> None:
    box, _ = running
    [server] = servers(box)
    os.kill(server, signal.SIGSTOP)
    try:
        took = []
        for _ in range(3):
            began = time.monotonic()
            seen = look(box)
            took.append(time.monotonic() - began)
        assert 2 <= min(took) < 8, took
        assert seen.run["tmux"] is None
        assert seen.word == "warming-up" and seen.causes == ()
        assert "tmux does not answer" in seen.screen
        stopped = box.call("stop").result
        assert (stopped["outcome"], stopped["lost_steps"], stopped["survivors"]) == ("stopped", 0, [])
    finally:
        os.kill(server, signal.SIGCONT)


def servers(box: Box) -> list[int]:
    """The tmux servers of this box."""
    mark = f"TMUX_TMPDIR={box.roots['run']}/tmux".encode()
    return [pid for pid in procs.pids() if mark in procs.read_proc(pid, "environ").split(b"\0")]


@fault(
    "the supervisor is killed, the trainer goes on",
    promised="the run goes on and is watched; what is lost is named; `abort` loses no step",
    seen="`the supervisor is gone: the run goes on`; then `stopped`",
)
@fault(
    "the supervisor is killed, then the trainer",
    promised="told in one look, although nobody wrote how it ended; resumed at the last checkpoint",
    seen="`crashed`, exit 4: `vanished in phase `",
)
def test_the_supervisor_is_killed(running: tuple[Box, str]) -> None:
    box, run = running
    os.kill(pid_of(box, "supervisor"), signal.SIGKILL)
    box.wait_for(lambda: len(box.scope(run)) == 1, "the supervisor's end")
    seen = look(box)
    assert seen.word == "warming-up" and "the supervisor is gone: the run goes on" in seen.screen
    step = box.file(run, "state.json")["step"]
    box.wait_for(lambda: box.file(run, "state.json")["step"] > step, "the run goes on")
    stopped = box.call("stop").result
    assert (stopped["outcome"], stopped["lost_steps"]) == ("stopped", 0)
    assert look(box).word == "stopped"

    second = box.start(recipe={"save_every": 5}, resume="none").result["run"]
    box.wait_for(lambda: look(box).run["checkpoints"], "a checkpoint")
    for role in ("supervisor", "trainer"):
        os.kill(pid_of(box, role), signal.SIGKILL)
    box.wait_for(lambda: not box.scope(second), "their end")
    seen = look(box)
    assert (seen.word, seen.exit_code) == ("crashed", 4)
    assert "vanished in phase " in seen.screen and not (box.run_dir(second) / "exit.json").exists()
    saved = seen.run["checkpoints"][-1]["step"]
    again = box.start(recipe={"save_every": 5}).result
    assert again["resume_from"] == {**again["resume_from"], "run": second, "step": saved}
    box.call("stop")
