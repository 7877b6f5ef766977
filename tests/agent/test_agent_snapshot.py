"""`status` must answer at once, with facts only, however damaged the files, however stuck the driver."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.table import fault

GARBAGE = {
    "run.json": b'{"id": "r-00',
    "state.json": b"\x00\xff\xfe",
    "exit.json": b"[1, 2]",
    "stop.json": b"",
    "metrics.jsonl": b'{"step": 1}\nnonsense\n[3]\n{"step": 2}\n{"ste',
    "train.log": b"\xff\xfe broken \x00\nok\r 50%\r100%\nlast",
}


def test_an_empty_container_is_a_plain_snapshot(box):
    result = box.call("snapshot").result
    assert result["run"] is None and result["runs"] == [] and result["lock"] is None
    assert result["release"] == {"current": None, "previous": None, "count": 0}
    assert result["disks"][0]["free_bytes"] > 0 and result["shm"]["path"] == "/dev/shm"
    assert not Path(box.roots["lib"]).exists(), "a look changes nothing"


def test_damaged_files_count_as_missing(box):
    folder = box.run_dir("r-0001")
    folder.mkdir(parents=True)
    for name, data in GARBAGE.items():
        (folder / name).write_bytes(data)
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    (folder / "checkpoints" / "step-000020").mkdir()
    (folder / "checkpoints" / "step-000020" / "complete.json").write_text('{"step": 20}')
    (folder.parent / "not-a-run").mkdir()
    Path(box.roots["run"]).mkdir()
    for name in ("lock", "nvidia-smi.json"):
        (Path(box.roots["run"]) / name).write_text(json.dumps({"pid": os.getpid(), "since": "x"}))
    run = box.call("snapshot").result["run"]
    assert [run[name] for name in ("record", "state", "exit", "stop")] == [None] * 4
    assert run["metrics"] == [{"step": 1}, {"step": 2}]
    assert [each["step"] for each in run["checkpoints"]] == [20] and run["checkpoints"][0]["bytes"] == 12
    assert run["log"]["tail"] == ["\ufffd\ufffd broken \x00", "100%", "last"]
    assert run["processes"] == [] and run["tmux"] is False and run["log"]["traceback"] == []
    assert box.call("snapshot", run="../r-0001").error["kind"] == "no-run"


def test_the_last_traceback_is_found_among_other_output(box):
    folder = box.run_dir("r-0001")
    folder.mkdir(parents=True)
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nKeyError: {}\n'
    text = "noise\n" * 5000 + trace.format(1) + "between\n" + trace.format(2) + "after\n"
    (folder / "train.log").write_text(text)
    found = box.call("snapshot").result["run"]["log"]["traceback"]
    assert found == trace.format(2).splitlines()
    fault = "Fatal Python error: Segmentation fault\n\nThread 1:\n  File a\n\nother\n"
    (folder / "train.log").write_text(fault)
    found = box.call("snapshot").result["run"]["log"]["traceback"]
    assert found == fault.splitlines()[:4]
    held = "Timeout (0:03:00)!\nThread 0x7f01 (most recent call first):\n  File a\n"
    (folder / "train.log").write_text(f"{trace.format(1)}TimeoutError: Timeout (5 s)\n{held}\n")
    found = box.call("snapshot").result["run"]["log"]["traceback"]
    assert found == held.splitlines()
    hang = "no thread has moved for 122 s:\n  target-3: features, for 131 s\nstack of target-3:\n  File a\n"
    (folder / "train.log").write_text(trace.format(1) + hang + "120/400  30.0%\n")
    found = box.call("snapshot").result["run"]["log"]["traceback"]
    assert found == hang.splitlines(), "what the watchdog said of a hang is later than any exception"


def test_huge_files_are_not_read_whole(box):
    folder = box.run_dir("r-0001")
    folder.mkdir(parents=True)
    for name in ("train.log", "metrics.jsonl"):
        with (folder / name).open("wb") as file:
            file.truncate(20_000_000_000)  # sparse: no byte on the disk
            file.seek(0, os.SEEK_END)
            file.write(b'\n{"step": 7}\n')
    took = []
    while not took or (min(took) >= 3 and len(took) < 5):  # the best: other work on the cores is not ours
        began = time.monotonic()
        run = box.call("snapshot", log_lines=1).result["run"]
        took.append(time.monotonic() - began)
    assert min(took) < 3
    assert run["log"]["tail"] == ['{"step": 7}'] and run["metrics"] == [{"step": 7}]


def test_runs_are_listed_newest_first_by_number(box):
    for number in (1, 2, 10, 10000):
        box.run_dir(f"r-{number:04d}").mkdir(parents=True)
    result = box.call("snapshot").result
    assert [each["id"] for each in result["runs"]] == ["r-10000", "r-0010", "r-0002", "r-0001"]
    assert result["run"]["id"] == "r-10000"


def fake_driver(box, script):
    """A program in nvidia-smi's place: the real one cannot be made to hang, and most machines have none."""
    folder = box.base / "bin"
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho $$ >> {box.base}/asked\n{script}\n")
    program.chmod(0o755)
    box.environment["PATH"] = f"{folder}:{box.environment['PATH']}"


def asked(box):
    return [int(line) for line in (box.base / "asked").read_text().split()]


def test_gpu_rows_have_numbers_and_null_where_the_driver_has_none(box):
    rows = [
        "0, NVIDIA H200, 570.1, 1024, 143771, 98, 61, 640.25, 700.00",
        "1, X, 5, [N/A], 9, 0, 3, [N/A], 1",
    ]
    fake_driver(box, "\n".join(f"echo '{row}'" for row in rows))
    gpus = box.call("snapshot").result["gpus"]
    assert gpus["status"] == "ok"
    assert gpus["rows"][0] == {
        "index": 0,
        "name": "NVIDIA H200",
        "driver": "570.1",
        "memory_used_mib": 1024,
        "memory_total_mib": 143771,
        "utilization_pct": 98,
        "temperature_c": 61,
        "power_w": 640.25,
        "power_limit_w": 700.0,
        "ecc_uncorrectable": None,
        "throttle": None,
        "fault": None,
    }
    assert gpus["rows"][1]["memory_used_mib"] is None and gpus["rows"][1]["power_w"] is None


def test_a_driver_that_fails_is_an_error_with_its_words(box):
    fake_driver(box, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    gpus = box.call("snapshot").result["gpus"]
    assert gpus["status"] == "error" and "ended with 18: Failed to initialize NVML" in gpus["detail"]


def test_a_driver_that_hangs_meets_the_deadline_and_is_not_asked_again_while_it_hangs(box):
    Path(box.roots["run"]).mkdir()
    fake_driver(box, "exec sleep 60")
    began = time.monotonic()
    gpus = box.call("snapshot", gpu_deadline_s=0.5).result["gpus"]
    assert gpus["status"] == "timeout" and time.monotonic() - began < 40
    # the child of a healthy driver dies of SIGKILL; one in state D does not: a live process takes its place
    with (Path(box.roots["run"]) / "nvidia-smi.json").open("w") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        stuck = subprocess.Popen(["sleep", "60"], pass_fds=(note.fileno(),))
        note.write(json.dumps({"pid": stuck.pid, "since": time.monotonic() - 100}))
    try:
        gpus = box.call("snapshot", gpu_deadline_s=0.5).result["gpus"]
        assert gpus["status"] == "timeout" and "hangs in the driver for 10" in gpus["detail"]
        assert len(asked(box)) == 1
    finally:
        stuck.send_signal(signal.SIGKILL)
        stuck.wait()
    box.call("snapshot", gpu_deadline_s=0.5)
    assert len(asked(box)) == 2, "it is asked again when the stuck one is gone"


def test_looks_at_one_time_ask_the_driver_one_after_the_other(box):
    Path(box.roots["run"]).mkdir()
    fake_driver(box, f"mkdir {box.base}/one || exit 3; sleep 0.2; rmdir {box.base}/one; echo '0, X, 5, 1, 9'")
    looks = [box.begin("snapshot", {"gpu_deadline_s": 60.0}) for _ in range(4)]
    answers = [box.collect(look).result["gpus"] for look in looks]
    assert [gpus["status"] for gpus in answers] == ["ok"] * 4, answers
    assert len(asked(box)) == 4


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_a_container_without_a_gpu_says_so(box):
    gpus = box.call("snapshot").result["gpus"]
    assert gpus == {"status": "absent", "detail": "no NVIDIA GPU in this container", "rows": []}


def old_python():
    """A working Python 3.9, the oldest that the agent must run on."""
    named = [
        shutil.which("python3.9"),
        *map(str, sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python3"))),
    ]
    for path in filter(None, named):
        done = subprocess.run(
            [path, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True
        )
        if done.stdout.strip() == "(3, 9)":
            return path
    return None


@fault(
    "agent sent to a real Python 3.9",
    promised="every verb works",
    seen="deploy, start, restart, read, exec, doctor, stop, snapshot on `3.9.`",
    part="place",
)
@pytest.mark.skipif(old_python() is None, reason="no working python3.9 on this machine")
def test_every_verb_works_on_python_3_9(box):
    box.python = old_python()
    assert box.deploy().result["versions"].endswith(f"python {box.call('snapshot').result['python']}")
    assert box.start().result["run"] == "r-0001"
    assert box.start(verb="restart").result["stop"]["outcome"] == "stopped"
    assert box.call("read", run="r-0001", lines=100_000).out.startswith(b"environment")
    assert box.call("exec", argv=["echo", "hi"]).out == b"hi\n"
    facts = box.call("doctor", recipe="tiny", python=box.python).result
    assert facts["agent_python"]["version"].startswith("3.9.") and facts["recipe"]["error"] is None
    assert box.call("stop").result["outcome"] == "stopped"
    assert box.call("snapshot").result["python"].startswith("3.9.")


def test_a_snapshot_takes_little_time(box):
    def once():
        began = time.perf_counter()
        box.call("snapshot")
        return time.perf_counter() - began

    took = [once() for _ in range(5)]
    while min(took) >= 0.5 and len(took) < 30:
        took.append(once())
    best = min(took)
    print(f"best of {len(took)}: {best * 1000:.0f} ms on {sys.version.split()[0]}")
    assert best < 0.5  # 60 ms is the aim on an idle machine; a busy one must not fail the test


def test_values_of_the_wrong_kind_count_as_missing(box):
    folder = box.run_dir("r-0001")
    folder.mkdir(parents=True)
    state = {"phase": ["x"], "heartbeat": "soon", "step": True, "steps": 9, "loss": float("nan"), "new": [1]}
    state |= {"notes": [None, "read this", {"a": 1}], "compile": [1], "last_checkpoint": {"step": "x"}}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "run.json").write_text('{"created": "today", "resume_from": 7, "argv": ["a"]}')
    (folder / "metrics.jsonl").write_text(
        '{"step": "x", "loss": 1}\n{"step": 2, "loss": 1e999, "accuracy": []}\n'
    )
    run = box.call("snapshot").result["run"]
    expected = dict.fromkeys(state) | {"steps": 9, "new": [1], "notes": ["read this"]}
    assert run["state"] == expected | {"last_checkpoint": {"step": None}}
    assert run["record"] == {"created": None, "resume_from": None, "argv": ["a"]}
    assert run["metrics"] == [{"step": 2, "loss": None, "accuracy": []}]
