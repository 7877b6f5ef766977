"""A crash is tried again from its checkpoint, a few times, never in vain: real trainers that really die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from agent import attempts
from agent.attempts import Crash, why_not

ROOM = 1 << 40
CUDA = "CUDA error: unspecified launch failure"
OOM = "CUDA out of memory. Tried to allocate {} GiB"


def begin(box, *deaths, limit=3, backoff=0.05, **recipe):
    """A run that dies as told, with a checkpoint every second step."""
    told = [{"at": at, "of": of} for at, of in deaths]
    recipe = {"steps": 12, "step_s": 0.01, "save_every": 2, "deaths": told, **recipe}
    return box.start(recipe=recipe, auto_restart=limit, backoff_s=backoff)


def ended(box, run="r-0001", seconds=60):
    path = box.run_dir(run) / "exit.json"
    box.wait_for(path.exists, "the run's end", seconds)
    return json.loads(path.read_text())


def steps(box, run="r-0001"):
    path = box.run_dir(run) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def test_two_crashes_are_survived_without_a_doubled_or_a_lost_step(ready):
    begin(ready, (5, CUDA), (9, "SIGKILL"))
    assert ended(ready)["reason"] == "finished"
    assert steps(ready) == list(range(1, 13))
    told = ready.call("snapshot").result["run"]["attempts"]
    assert (told["limit"], told["restarted"], told["given_up"]) == (3, 2, None)
    first, second = told["crashes"]
    assert (first["step"], first["code"], first["says"]) == (5, 1, f"RuntimeError: {CUDA}")
    assert first["resume"]["step"] == 4 and second["resume"]["step"] == 8
    assert (second["step"], second["signal"], second["says"]) == (9, "SIGKILL", "killed by SIGKILL")
    log = (ready.run_dir("r-0001") / "train.log").read_text()
    assert "· attempt 2 of 4 begins at the checkpoint of step 4\n" in log
    assert "· attempt 3 of 4 begins at the checkpoint of step 8\n" in log
    assert log.count("\nstep 5\n") == 2 and log.count("\nstep 4\n") == 1


def test_without_the_wish_a_crash_is_the_end(ready):
    begin(ready, (5, CUDA), limit=0)
    end = ended(ready)
    assert (end["reason"], end["detail"]) == ("crashed", f"RuntimeError: {CUDA}")
    assert ready.call("snapshot").result["run"]["attempts"] is None
    assert ready.file("r-0001", "run.json")["auto_restart"]["limit"] == 0


def test_a_crash_before_the_first_checkpoint_begins_where_the_run_began(ready):
    begin(ready, (1, CUDA), save_every=0)
    assert ended(ready)["reason"] == "finished" and steps(ready) == list(range(1, 13))
    begin(ready, (14, CUDA), steps=20, save_every=0)  # another configuration: from scratch
    assert ended(ready, "r-0002")["reason"] == "finished" and steps(ready, "r-0002") == list(range(1, 21))


def test_the_number_of_restarts_is_limited(ready):
    begin(ready, (3, CUDA), (6, CUDA), (9, CUDA), limit=2)
    assert ended(ready)["reason"] == "crashed"
    told = ready.file("r-0001", "attempts.json")
    assert told["given_up"] == "no restart is left" and told["restarted"] == 2
    assert [each["step"] for each in told["crashes"]] == [3, 6, 9] and told["crashes"][-1]["again_at"] is None


@pytest.mark.parametrize(
    ("deaths", "reason"),
    [
        (
            [(5, f"{CUDA} at 0x7f01"), (5, f"{CUDA} at 0x7e99")],
            "the same failure at step 5 for the second time",
        ),
        ([(3, OOM.format(2)), (9, OOM.format("1.5"))], "memory did not suffice for the second time"),
        ([(3, "[Errno 28] No space left on device")], "the disk was full"),
        ([(3, CUDA), (7, "refusal")], "the trainer refused to go on, and would again"),
    ],
    ids=["same-step", "memory", "disk", "refusal"],
)
def test_what_is_not_tried_again(ready, deaths, reason):
    begin(ready, *deaths)
    end = ended(ready)
    assert end["reason"] == "crashed" and end["code"] == (2 if "refused" in reason else 1)
    told = ready.file("r-0001", "attempts.json")
    assert told["given_up"] == reason and told["restarted"] == len(deaths) - 1


def test_a_run_that_dies_before_its_first_state_is_told_at_once(ready):
    answer = ready.start("die", auto_restart=3, backoff_s=30)
    assert answer.error["kind"] == "died" and ended(ready)["reason"] == "crashed"
    assert ready.file("r-0001", "attempts.json")["given_up"] == "it died before its first state"


def waiting(box):
    """The run in its back-off."""
    path = box.run_dir("r-0001") / attempts.NAME
    box.wait_for(path.exists, "the crash")
    return json.loads(path.read_text())


def test_the_pause_is_kept_and_an_abort_ends_it(ready):
    begin(ready, (5, CUDA), backoff=60)
    told = waiting(ready)
    assert 58 < told["crashes"][0]["again_at"] - told["crashes"][0]["at"] < 62 and told["restarted"] == 0
    roles = [each["role"] for each in ready.call("snapshot").result["run"]["processes"]]
    assert roles == ["supervisor"]
    refused = ready.start().error
    assert refused["kind"] == "run-alive"
    began = time.monotonic()
    result = ready.call("stop").result
    assert time.monotonic() - began < 40
    assert (result["outcome"], result["step"], result["checkpoint"]["step"]) == ("stopped", 5, 4)
    assert result["killed"] == [] and not ready.scope("r-0001")
    end = ended(ready)
    assert end["reason"] == "stopped" and CUDA in end["detail"]


def test_a_supervisor_that_dies_in_the_pause_takes_the_restart_with_it(ready):
    begin(ready, (5, CUDA), backoff=3)
    waiting(ready)
    [supervisor] = ready.scope("r-0001")
    os.kill(supervisor.pid, signal.SIGKILL)
    folder = ready.file("r-0001", "run.json")["release_dir"]
    again = [sys.executable, "-m", "agent.supervise", str(ready.run_dir("r-0001"))]
    assert subprocess.run(again, cwd=folder, capture_output=True).returncode == 2
    time.sleep(3.5)
    assert not ready.scope("r-0001") and steps(ready)[-1] == 5
    resumed = begin(ready)
    assert resumed.result["resume_from"] == {
        "run": "r-0001",
        "step": 4,
        "path": str(ready.run_dir("r-0001") / "checkpoints" / "step-000004"),
    }


def test_what_a_dead_trainer_left_is_ended_before_the_next_attempt(ready):
    begin(ready, (5, CUDA), behave="escape", step_s=0.02)
    assert ended(ready)["reason"] == "finished"
    left = [proc for proc in ready.scope("r-0001") if "agent.supervise" not in proc.argv]
    assert len(left) <= 1  # the last attempt's own: the first one's is gone


def test_a_stop_in_a_later_attempt_is_a_stop(ready):
    begin(ready, (5, CUDA), steps=100000)
    ready.wait_for(lambda: steps(ready)[-1:] > [8], "the second attempt")
    assert ready.call("stop").result["outcome"] == "stopped"
    assert ended(ready)["reason"] == "stopped"


def crash(step, failure="1 x", text=""):
    return Crash(step, "x", failure, text)


def test_threads_run_ahead_so_a_step_is_the_same_within_two():
    end = {"code": 1}
    before = [crash(40)]
    assert why_not(crash(42), before, end, 5, ROOM).startswith("the same failure at step 42")
    assert why_not(crash(43), before, end, 5, ROOM) == ""
    assert why_not(crash(41, "1 y"), before, end, 5, ROOM) == ""
    assert why_not(crash(None), [crash(None)], end, 5, ROOM).startswith(
        "the same failure before its first state"
    )
    assert why_not(crash(40), [], end, 5, 1000) == "the disk was full"


def test_pauses_double_up_to_ten_minutes():
    assert [attempts.pause_s(n, 15.0) for n in (1, 2, 3, 6, 7, 9)] == [15, 30, 60, 480, 600, 600]


def test_an_exception_of_many_lines_is_told_by_its_first(ready):
    says = (
        f"{CUDA}\nCUDA kernel errors might be reported later.\n\nCompile with TORCH_USE_CUDA_DSA to see more."
    )
    begin(ready, (5, says), limit=0)
    assert ended(ready)["detail"] == f"RuntimeError: {CUDA}"
