"""Break-glass: one operator's agent hangs, another ends exactly that, and the run goes on."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from agent import lock


def held(box, user="bob"):
    """A stop of bob's that will wait for an hour, because the trainer does not listen."""
    box.start("ignore-term")
    agent = box.begin("stop", {"grace_s": 3600}, user)
    box.next_frame(agent)
    return agent, lock.owner(box.roots["run"])


def test_the_agent_that_holds_the_lock_is_ended_and_the_run_is_not(ready):
    agent, owner = held(ready)
    refused = ready.call("stop").error
    assert refused["kind"] == "locked" and refused["message"].startswith("bob@desk holds this box for ")
    assert refused["hint"] == "wait until it has ended; invoke unlock ends it if it hangs"
    seen = ready.call("unlock").result
    assert (seen["outcome"], seen["owner"]) == ("held", owner) and owner["operator"]["user"] == "bob"
    assert agent.poll() is None
    done = ready.call("unlock", pid=owner["pid"], since=owner["since"]).result
    assert done["outcome"] == "broken" and agent.wait(60) == -signal.SIGTERM
    ready.collect(agent)
    assert len(ready.scope("r-0001")) == 2
    assert ready.call("unlock").result["outcome"] == "free"
    assert ready.call("stop", grace_s=0.1).result["outcome"] == "killed"


def test_a_stopped_one_is_ended_too(ready):
    agent, owner = held(ready)
    os.kill(agent.pid, signal.SIGSTOP)
    assert ready.call("unlock", pid=owner["pid"], since=owner["since"]).result["outcome"] == "broken"
    ready.collect(agent)


def test_only_the_one_that_was_seen(ready):
    agent, owner = held(ready)
    error = ready.call("unlock", pid=owner["pid"], since=owner["since"] - 1).error
    assert error["message"] == "somebody else holds the lock by now; nothing was done"
    assert agent.poll() is None and lock.owner(ready.roots["run"]) == owner
    agent.kill()
    ready.collect(agent)


def test_a_process_without_the_lock_is_left_alone(box):
    """The file may name a process that is not the holder: a number that passed on, a disk that was full."""
    folder = Path(box.roots["run"])
    folder.mkdir()
    with (folder / "lock").open("w") as file:
        file.write('{"operator": {}, "verb": "stop", "since": 5.0, "pid": 1}')
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        error = box.call("unlock", pid=1, since=5.0).error
    assert error["kind"] == "locked" and "cannot be found" in error["message"]
