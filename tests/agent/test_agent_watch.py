"""One long look: whole once, then only what is new, until the run has ended or nobody reads."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from agent import baseline, procs


def first_parts(process, box, count):
    found = []
    while len(found) < count:
        kind, data = box.next_frame(process)
        if kind == "part":
            found.append(json.loads(data))
    return found


def parts_until(process, box, fact):
    """What came up to the part of which `fact` is true."""
    found, ends = [], time.monotonic() + 900
    while not found or not fact(found[-1]):
        assert time.monotonic() < ends, found[-1:]
        found += first_parts(process, box, 1)
    return found


@pytest.fixture
def living(box):
    """Makes a run without a trainer that lives as long as the test: its folder."""
    left = []

    def begin(record):
        folder = box.run_dir("r-0001")
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"id": "r-0001", "created": time.time(), **record}))
        marks = {procs.RUN_ID: "r-0001", procs.RUN_DIR: str(folder)}
        left.append(subprocess.Popen(["sleep", "900"], env={**os.environ, **marks}))
        return folder

    yield begin
    for process in left:
        process.kill()
        process.wait()


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


def test_a_traceback_and_a_baseline_are_sent_when_they_change(box, living):
    kind = {"config_hash": "c1", "gpus": {"names": {"NVIDIA H200": 1}}, "versions": {"torch": "2.13"}}
    folder = living(kind)
    log, hang = folder / "train.log", "no thread has moved for 240 s: target-0 waits"
    log.write_text("one\n")
    process = box.begin("watch", {"interval_s": 0.1})
    [whole] = first_parts(process, box, 1)
    run = whole["snapshot"]["run"]
    assert (run["log"]["traceback"], run["baseline"]) == ([], None)

    def told(part):
        return part["new"]["run"]["log"].get("traceback")

    def grow(text):
        with log.open("a") as file:
            file.write(text)

    grow(f"two\n{hang}\nstack of target-0\n")
    parts = parts_until(process, box, told)
    assert told(parts[-1]) == [hang, "stack of target-0"]
    grow("    in wait\n")  # it goes on
    parts += parts_until(process, box, told)
    assert told(parts[-1])[-1] == "    in wait"
    grow("· attempt 2 of 4 begins\n")  # and is another attempt's
    parts += parts_until(process, box, lambda part: told(part) is not None)
    assert told(parts[-1]) == []

    place = Path(baseline.path(str(folder), kind))
    place.parent.mkdir()
    aside = place.with_name("new")
    aside.write_text(json.dumps({"runs": [{"run": "r-0001", "tokens_per_s": 812.5}]}))
    aside.replace(place)
    parts += parts_until(process, box, lambda part: part["new"]["run"].get("baseline"))
    assert parts[-1]["new"]["run"]["baseline"] == {"run": "r-0001", "tokens_per_s": 812.5, "runs": 1}
    parts += first_parts(process, box, 3)
    assert [told(part) for part in parts if told(part) is not None][2:] == [[]]
    assert sum(bool(part["new"]["run"].get("baseline")) for part in parts) == 1
    close(process)


def test_steps_that_were_taken_back_and_made_anew_between_two_looks_are_told_whole(box, living):
    """The file is longer than before, and what stands before the known end is another attempt's."""
    metrics = living({}) / "metrics.jsonl"

    def lines(steps, loss):
        return "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step in steps)

    metrics.write_text(lines(range(1, 28), 3.0))
    process = box.begin("watch", {"interval_s": 0.1})
    first_parts(process, box, 2)
    aside = metrics.with_name("aside")
    aside.write_text(lines(range(1, 21), 3.0) + lines(range(21, 61), 4.0))
    aside.replace(metrics)
    whole = parts_until(process, box, lambda part: "snapshot" in part)[-1]
    told = [(line["step"], line["loss"]) for line in whole["snapshot"]["run"]["metrics"]]
    assert told == [(step, 3.0 if step < 21 else 4.0) for step in range(1, 61)]
    assert whole["curves"]["steps"][-1] == 60
    with metrics.open("a") as file:
        file.write(lines([61], 4.0))
    part = parts_until(process, box, lambda part: part["new"]["run"]["metrics"])[-1]
    assert [line["step"] for line in part["new"]["run"]["metrics"]] == [61]
    close(process)
