"""A secret is in the trainer's environment and nowhere else: not for a moment, not after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import procs, secrets
from tests.faults.table import fault

VALUE = "planted-7f3a9c41"
LONG = {"steps": 100000, "step_s": 0.02}


class Sampler:
    """Looks at the argument list and the environment of every process, over and over."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self.environments: set[tuple[int, str]] = set()
        self.looks = 0
        self._over = threading.Event()

    def look(self) -> None:
        while not self._over.is_set():
            self.looks += 1
            for pid in procs.pids():
                inherits = VALUE.encode() in procs.read_proc(pid, "environ")  # first: exec sets both at once
                command = procs.read_proc(pid, "cmdline").decode("utf-8", "replace")
                if VALUE in command:
                    self.arguments.append(command)
                if inherits and command:
                    self.environments.add((pid, command))


@contextlib.contextmanager
def sampled() -> Iterator[Sampler]:
    sampler = Sampler()
    thread = threading.Thread(target=sampler.look)
    thread.start()
    try:
        yield sampler
    finally:
        sampler._over.set()
        thread.join()


def files_with_it(folder: Path) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and VALUE.encode() in path.read_bytes():
            found.append(str(path))
    return found


def environment_of(box: Any, run: str) -> dict[str, str]:
    trainer = box.wait_for(
        lambda: procs.roles(box.scope(run), box.file(run, "state.json")).trainer, "a trainer"
    )
    return procs.environment(trainer.pid)


def test_it_is_in_the_trainers_environment_and_nowhere_else(ready: Any) -> None:
    ready.private = {"environment": {"HF_TOKEN": VALUE}}
    with sampled() as sampler:
        answer = ready.start(recipe=LONG, auto_restart=1, backoff_s=0.1)
    run = answer.result["run"]
    assert environment_of(ready, run)["HF_TOKEN"] == VALUE
    assert sampler.looks > 5
    assert sampler.arguments == []
    assert all("-m\0trainer" in command for _, command in sampler.environments), sampler.environments
    tmux = {**os.environ, "TMUX_TMPDIR": f"{ready.roots['run']}/tmux"}
    for more in (["-g"], ["-t", run]):
        argv = ["tmux", "-L", "pctrun", "show-environment", *more]
        shown = subprocess.run(argv, env=tmux, capture_output=True, text=True)
        assert shown.returncode == 0 and VALUE not in shown.stdout
    record = ready.file(run, "run.json")
    assert record["secrets"] == ["HF_TOKEN"] and "HF_TOKEN" not in record["env"]
    assert VALUE not in json.dumps([answer.end, answer.notes]) + answer.stderr.decode()
    assert VALUE not in json.dumps(ready.call("snapshot").result)

    first = procs.roles(ready.scope(run), ready.file(run, "state.json")).trainer
    os.kill(first.pid, signal.SIGKILL)
    attempt = ready.wait_for(
        lambda: next((p for p in ready.scope(run) if "trainer" in p.argv and p.pid != first.pid), None),
        "another attempt",
    )
    assert procs.environment(attempt.pid)["HF_TOKEN"] == VALUE
    ready.call("stop")
    assert files_with_it(ready.base) == []


def test_without_tmux_it_arrives_all_the_same(ready: Any, tmp_path: Path) -> None:
    for name in ("env", "python3", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    ready.environment["PATH"] = str(tmp_path)
    ready.private = {"environment": {"HF_TOKEN": VALUE}}
    answer = ready.start(recipe=LONG)
    assert any("tmux" in note["text"] for note in answer.notes)
    assert environment_of(ready, answer.result["run"])["HF_TOKEN"] == VALUE


@pytest.mark.parametrize(
    "name,value,says",
    [
        ("PATH", VALUE, "cannot be called PATH"),
        ("PCTRUN_RUN_ID", VALUE, "cannot be called PCTRUN_RUN_ID"),
        ("A B", VALUE, "cannot be called A B"),
        ("TOKEN", [VALUE], "TOKEN is not text"),
        ("TOKEN", f"{VALUE}\0", "TOKEN is not text"),
        ("TOKEN", VALUE * 4000, "may travel"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    ready: Any, name: str, value: Any, says: str
) -> None:
    ready.private = {"environment": {name: value}}
    answer = ready.start()
    assert says in answer.error["message"] and answer.error["kind"] == "usage"
    assert VALUE not in json.dumps(answer.end)
    assert not ready.run_dir("r-0001").exists()


@fault(
    "the agent killed before the supervisor has read the secrets",
    promised="no training without them",
    seen="`crashed`: `these secrets did not reach the run: HF_TOKEN`",
    part="process",
)
def test_a_run_whose_secrets_did_not_arrive_does_not_begin(ready: Any) -> None:
    """The agent that offered them was killed before the supervisor came."""
    folder = ready.run_dir("r-0001")
    folder.mkdir(parents=True)
    record = {"argv": ["/bin/true"], "env": {}, "release_dir": "/", "secrets": ["HF_TOKEN"]}
    (folder / "run.json").write_text(json.dumps(record))
    argv = [ready.python, "-m", "agent.supervise", str(folder), "/proc/2147483646/fd/3"]
    subprocess.run(argv, cwd=Path(ready.roots["opt"]) / "current", timeout=300)
    end = ready.file("r-0001", "exit.json")
    assert (end["reason"], end["detail"]) == ("crashed", "these secrets did not reach the run: HF_TOKEN")


def test_an_offer_is_read_once() -> None:
    path = secrets.offer({"environment": {"A": "b"}})
    assert secrets.take(path) == {"environment": {"A": "b"}}
    assert secrets.take(path) is None
