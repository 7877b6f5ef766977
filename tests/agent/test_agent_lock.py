"""One operator at a time changes a box, and whoever comes second is told who is at work."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.faults.table import fault


def test_the_second_of_two_operators_is_told_who_holds_the_box(ready):
    ready.start("ignore-term")
    first = ready.begin("stop", {"grace_s": 120}, user="ana")
    ready.next_frame(first)
    for verb in ("stop", "start", "restart", "deploy"):
        args = {"recipe": "tiny"} if verb in ("start", "restart") else {}
        args = ready.release_args(ready.payload()) if verb == "deploy" else args
        error = ready.call(verb, user="bob", **args).error
        assert error["kind"] == "locked" and error["message"].startswith("ana@desk holds this box for ")
    assert ready.call("snapshot").result["lock"]["operator"]["user"] == "ana"
    processes = ready.call("snapshot").result["run"]["processes"]
    os.kill(next(each["pid"] for each in processes if each["role"] == "trainer"), signal.SIGKILL)
    assert ready.collect(first).result["outcome"] == "stopped"
    assert ready.call("snapshot").result["lock"] is None


def test_a_look_at_the_lock_does_not_refuse_a_change(ready):
    Path(ready.roots["run"]).mkdir()
    with (Path(ready.roots["run"]) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        agent = ready.begin("stop")
        ready.wait_for(lambda: waits_for_lock(agent.pid, file), "the agent has met the look's lock")
        fcntl.flock(file, fcntl.LOCK_UN)
        assert ready.collect(agent).result["outcome"] == "nothing-to-stop"


def waits_for_lock(pid, file):
    """Whether the process has the lock's file open, and so is trying for it."""
    fds = Path(f"/proc/{pid}/fd")
    return any(os.path.realpath(each) == file.name for each in fds.iterdir())


def test_a_run_is_started_only_once(ready):
    ready.start()
    folder = ready.file("r-0001", "run.json")["release_dir"]
    argv = [sys.executable, "-m", "agent.supervise", str(ready.run_dir("r-0001"))]
    second = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    assert second.returncode == 2 and "was started before" in second.stderr
    assert len(ready.scope("r-0001")) == 2


@fault(
    "the agent killed while it holds the lock",
    promised="the lock goes with its process",
    seen="the next operator is served",
    part="place",
)
def test_a_killed_agent_leaves_no_lock(ready):
    ready.start("ignore-term")
    first = ready.begin("stop", {"grace_s": 60})
    ready.next_frame(first)
    first.kill()
    ready.collect(first)
    assert ready.call("stop", grace_s=0.2).result["outcome"] == "killed"
