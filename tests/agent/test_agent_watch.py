"""One long look: whole once, then only what is new, until the run has ended or nobody reads."""

import json
import os
import signal
import time

import pytest

from agent import procs


def first_parts(process, box, count):
    found = []
    while len(found) < count:
        kind, data = box.next_frame(process)
        if kind == "part":
            found.append(json.loads(data))
    return found


def close(process):
    """Leave, as a reader does whose line was cut."""
    process.stdout.close()
    process.wait(60)
    process.stdin.close()
    process.stderr.close()


def test_after_the_first_look_only_what_is_new_travels(ready):
    ready.start(recipe={"steps": 100000, "step_s": 0.02, "save_every": 60})
    ready.wait_for(lambda: (ready.run_dir("r-0001") / "metrics.jsonl").exists(), "a step")
    process = ready.begin("watch", {"interval_s": 0.2})
    whole, *new = first_parts(process, ready, 16)
    assert whole["snapshot"]["run"]["id"] == "r-0001"
    assert len(whole["curves"]["steps"]) == len(whole["curves"]["loss"])
    steps = [line["step"] for part in new for line in part["new"]["run"]["metrics"]]
    seen = [line["step"] for line in whole["snapshot"]["run"]["metrics"]]
    joined = sorted(set(seen) | set(steps))
    assert len(steps) >= 10 and steps == sorted(set(steps))
    assert joined == list(range(joined[0], joined[-1] + 1))
    tails = [line for part in new for line in part["new"]["run"]["log"]["tail"]]
    assert [line for line in tails if line.startswith("step ")] == [
        f"step {n}" for n in range(int(tails[0].split()[1]), int(tails[-1].split()[1]) + 1)
    ]
    saved = [part["new"]["run"]["checkpoints"] for part in new if "checkpoints" in part["new"]["run"]]
    assert saved and saved[-1][-1]["step"] % 60 == 0 and len(saved) < len(new)
    assert all(process_["role"] for part in new for process_ in part["new"]["run"]["processes"])
    for part in new:  # a line of metrics and one of the log for each step
        assert len(json.dumps(part)) < 6000 + 200 * len(part["new"]["run"]["metrics"])
    close(process)
    assert process.returncode == 1


def test_the_last_look_is_whole_and_says_how_it_ended(ready):
    ready.start(recipe={"steps": 60, "step_s": 0.05})
    pid = procs.roles(ready.scope("r-0001"), None).trainer.pid
    os.kill(pid, signal.SIGSTOP)  # two looks at it while it lives
    process = ready.begin("watch", {"interval_s": 0.2})
    first, second = first_parts(process, ready, 2)
    os.kill(pid, signal.SIGCONT)
    answer = ready.collect(process)
    assert answer.result == {"run": "r-0001", "looks": 2 + len(answer.part)}
    assert "snapshot" in first and "new" in second
    assert answer.part[-1]["snapshot"]["run"]["exit"]["reason"] == "finished"


def test_a_newer_run_takes_the_place_of_the_newest(ready):
    ready.start(recipe={"steps": 100000, "step_s": 0.02})
    process = ready.begin("watch", {"interval_s": 0.2})
    first_parts(process, ready, 2)
    ready.start(verb="restart", recipe={"steps": 100000, "step_s": 0.02}, resume="none")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        [part] = first_parts(process, ready, 1)
        if part.get("snapshot", {}).get("run", {}).get("id") == "r-0002":
            break
    else:
        pytest.fail("the second run was never shown")
    close(process)


def test_without_a_run_there_is_one_look(box):
    answer = box.call("watch")
    assert answer.part == [{**answer.part[0], "curves": None}]
    assert answer.part[0]["snapshot"]["run"] is None
    assert answer.result == {"run": None, "looks": 1}


def test_a_log_that_runs_away_is_shown_by_its_end(box):
    folder = box.run_dir("r-0001")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": "r-0001", "created": time.time()}))
    log = folder / "train.log"
    log.write_bytes(b"first\npart of a li")
    process = box.begin("watch", {"interval_s": 0.2})
    first_parts(process, box, 1)
    with log.open("ab") as file:
        file.write(
            b"ne\n" + b"x" * 99 + b"\n" + b"y" * 99 + b"\n" * 3000 + os.urandom(200_000).hex().encode()
        )
        file.write(b"\nlast\n")
    part, ends = None, time.monotonic() + 60
    while part is None or part["new"]["run"]["log"]["tail"][-1:] != ["last"]:
        assert time.monotonic() < ends, part
        [part] = first_parts(process, box, 1)
        assert len(json.dumps(part)) < 80_000
    close(process)
