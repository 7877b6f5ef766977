"""Whole runs as real processes that are really killed: what the next run finds, what the files say."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"
DEADLINE_S = 300.0
STATE = set(  # docs/architecture.md, "In the container"
    """schema pid phase phase_since training_since heartbeat progress_at step steps detail compile
    step_time_s tokens_per_s loss tau last_checkpoint topology pipeline kernels notes""".split()  # noqa: SIM905
)
METRIC = {"step", "time", "loss", "lr", "grad_norm", "tokens", "step_s", "compile", "accuracy", "busy"}


class Run:
    """`python -m trainer --run-dir DIR` on a run.json as the agent writes it."""

    def __init__(
        self,
        folder: Path,
        release: Path,
        overrides: dict[str, Any],
        resume: Path | None = None,
        processes: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.dir = folder
        folder.mkdir()
        step = resume and json.loads((resume / "complete.json").read_text())["step"]
        order = {
            "release_dir": str(release),
            "recipe": "tiny",
            "overrides": overrides,
            "resume_from": {"run": "r-0001", "step": step, "path": str(resume)} if resume else None,
        }
        (folder / "run.json").write_text(json.dumps(order))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        launcher = launcher if processes > 1 else []
        self._log = (folder / "train.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "trainer", "--run-dir", str(folder)],
            cwd=PAYLOAD,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def until(self, fact: Callable[[], Any]) -> Any:
        """Wait for a fact that the run's files tell."""
        end = time.monotonic() + DEADLINE_S
        while not (value := fact()):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.005)
        return value

    def ended(self) -> int:
        self._log.close()
        return self.process.wait(DEADLINE_S)

    def log(self) -> str:
        return (self.dir / "train.log").read_text()

    def state(self) -> dict[str, Any]:
        return json.loads((self.dir / "state.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def steps(self) -> int:
        return len(self.metrics())

    def checkpoints(self) -> list[Path]:
        return sorted((self.dir / "checkpoints").glob("step-*"))


def losses(run: Run) -> list[tuple[int, float, float]]:
    return [(m["step"], m["loss"], m["grad_norm"]) for m in run.metrics()]


def test_a_run_killed_at_a_random_step_and_resumed_equals_one_that_was_not_bit_for_bit(
    tmp_path, tiny_release
):
    whole = Run(tmp_path / "whole", tiny_release, {"train.steps": 40})
    assert whole.ended() == 0, whole.log()
    truth = losses(whole)
    assert len(truth) == 40

    killed = Run(tmp_path / "killed", tiny_release, {"train.steps": 40})
    at = random.randrange(5, 20)
    killed.until(lambda: killed.steps() >= at)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.ended() == -signal.SIGKILL
    before = losses(killed)
    assert 5 <= len(before) < 40
    assert before == truth[: len(before)]

    newest = killed.checkpoints()[-1]
    resumed = Run(tmp_path / "resumed", tiny_release, {"train.steps": 40}, resume=newest)
    assert resumed.ended() == 0, resumed.log()
    done = json.loads((newest / "complete.json").read_text())["step"]
    assert losses(resumed) == truth[done:]
    same = [(run.checkpoints()[-1] / "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert same[0] == same[1]

    state = whole.state()
    assert (state["phase"], state["step"], state["steps"]) == ("finished", 40, 40)
    assert state["tau"] is not None
    assert (whole.dir / "export" / "config.json").is_file()
    assert "verify: warn  0 break serving, 1 to look at" in whole.log()  # its layer types are mixed
    assert [path.name for path in whole.checkpoints()] == [
        "step-000036",
        "step-000040",
    ]  # keep_checkpoints: 2
    assert sum(loss for _, loss, _ in truth[-5:]) < 0.9 * sum(loss for _, loss, _ in truth[:5])


def test_a_finished_run_is_prolonged_on_the_rows_of_one_that_was_longer_from_the_start(
    tmp_path, tiny_release
):
    """At a rate that moves no fp32 weight a step's loss tells its rows and its anchors, bit for bit."""
    still = {"train.lr": 1e-30}
    whole = Run(tmp_path / "whole", tiny_release, {**still, "train.steps": 30})
    assert whole.ended() == 0, whole.log()
    short = Run(tmp_path / "short", tiny_release, {**still, "train.steps": 20})
    assert short.ended() == 0, short.log()
    assert short.state()["phase"] == "finished"
    assert losses(short) == losses(whole)[:20]

    last = short.checkpoints()[-1]
    longer = Run(
        tmp_path / "longer",
        tiny_release,
        {**still, "train.steps": 30, "train.checkpoint_every": 7, "train.eval_every": 5},
        resume=last,
    )
    assert longer.ended() == 0, longer.log()
    assert last.name == "step-000020"
    assert losses(longer) == losses(whole)[20:]
    assert [m["tokens"] for m in longer.metrics()] == [m["tokens"] for m in whole.metrics()[20:]]
    assert [m["lr"] for m in longer.metrics()] == [m["lr"] for m in whole.metrics()[20:]]  # the new cosine
    assert len({loss for _, loss, _ in losses(whole)}) == 30  # no row like another
    state = longer.state()
    assert (state["phase"], state["step"], state["steps"]) == ("finished", 30, 30)
    moments = [(run.checkpoints()[-1] / "optimizer.safetensors").read_bytes() for run in (whole, longer)]
    assert moments[0] == moments[1]


def test_sigterm_before_the_first_step_stops_without_a_checkpoint(tmp_path, tiny_release):
    run = Run(tmp_path / "run", tiny_release, {})
    run.until(lambda: (run.dir / "state.json").exists())
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 0, run.log()
    assert run.state()["phase"] == "stopped"
    assert run.state()["last_checkpoint"] is None


def test_sigterm_loses_at_most_the_step_in_flight_and_the_files_keep_the_contract(tmp_path, tiny_release):
    overrides = {"train.steps": 100_000, "train.eval_every": 3, "topology.split": "1:2"}
    run = Run(tmp_path / "run", tiny_release, overrides)
    beats: list[float] = []

    def beat() -> bool:
        if (run.dir / "state.json").exists():
            state = run.state()
            if not beats or state["heartbeat"] != beats[-1]:
                beats.append(state["heartbeat"])
        return run.steps() >= 8

    run.until(beat)
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 0, run.log()

    state = run.state()
    assert state["phase"] == "stopped"
    assert state["step"] == run.steps()
    assert state["last_checkpoint"]["step"] == state["step"]
    assert Path(state["last_checkpoint"]["path"], "complete.json").is_file()

    gaps = [b - a for a, b in itertools.pairwise(beats)]
    assert statistics.median(gaps) < 2.0, gaps  # a single one may fall to other work on the cores
    assert set(state) == STATE
    assert set(state["pipeline"]) == {"split", "starving", "wait", "row_s", "advice", "gain"}
    assert state["pipeline"]["split"] == "1:2"
    assert state["pipeline"]["row_s"]["drafter"] > 0
    assert set(state["compile"]) >= {"count", "seconds", "active", "budget_s"}
    for line in run.metrics()[:-1]:  # a last step that was asked to stop does not evaluate
        assert set(line) - {"tau"} == METRIC
        assert ("tau" in line) == (line["step"] % 3 == 0)
        assert 0 < line["tokens"] <= 512
        assert set(line["busy"]) == {"loader", "target-0", "drafter-0", "drafter-1"}
        assert len(line["accuracy"]) == 3


def test_two_processes_take_the_steps_of_one(tmp_path, tiny_release):
    """torchrun, each process with one target and one drafter: the losses of one process with two of each."""
    overrides = {"train.steps": 12, "train.rows_per_step": 2, "train.eval_every": 5}
    one = Run(tmp_path / "one", tiny_release, {**overrides, "topology.split": "2:2"})
    assert one.ended() == 0, one.log()
    two = Run(tmp_path / "two", tiny_release, {**overrides, "topology.split": "1:1"}, processes=2)
    assert two.ended() == 0, two.log()
    for (step, loss, norm), (same_step, same_loss, same_norm) in zip(losses(one), losses(two), strict=True):
        assert step == same_step
        assert same_loss == pytest.approx(loss, rel=2e-6)
        assert same_norm == pytest.approx(norm, rel=2e-5)
    assert [m["tokens"] for m in one.metrics()] == [m["tokens"] for m in two.metrics()]
    assert [path.name for path in two.checkpoints()] == ["step-000008", "step-000012"]
    assert two.state()["phase"] == "finished" and (two.dir / "export").is_dir()
    assert not (two.dir / "process-1" / "checkpoints").exists()  # process 0 alone saves
    lines = (two.dir / "process-1/metrics.jsonl").read_text().splitlines()
    other = [json.loads(line)["loss"] for line in lines]
    assert other == [loss for _, loss, _ in losses(two)]


def test_a_stop_of_both_processes_ends_both_after_the_same_step(tmp_path, tiny_release):
    overrides = {"train.steps": 100_000, "train.rows_per_step": 2, "topology.split": "1:1"}
    run = Run(tmp_path / "run", tiny_release, overrides, processes=2)
    run.until(lambda: run.steps() >= 3)
    run.process.send_signal(signal.SIGTERM)  # torchrun passes it on
    run.ended()
    assert run.state()["phase"] == "stopped", run.log()
    assert run.state()["last_checkpoint"]["step"] == run.steps()
    lines = (run.dir / "process-1/metrics.jsonl").read_text().splitlines()
    assert len(lines) == run.steps()


def test_a_process_that_dies_ends_the_other_with_one_line(tmp_path, tiny_release):
    overrides = {"train.steps": 100_000, "train.rows_per_step": 2, "topology.split": "1:1"}
    run = Run(tmp_path / "run", tiny_release, overrides, processes=2)
    run.until(lambda: run.steps() >= 2)
    other = json.loads((run.dir / "process-1/state.json").read_text())["pid"]
    os.kill(other, signal.SIGKILL)
    assert run.ended() == 1
    assert "another process of this training is gone" in run.log()
    assert any("another process of this training is gone" in note for note in run.state()["notes"])
    for never in ("terminate called", "ThreadFailed", "forcefully exiting"):
        assert never not in run.log()
    assert (run.dir / "process-1/train.log").read_text().count("loading target") == 1
    assert run.log().count("loading target") == 1  # the log has each line once


def test_a_process_whose_other_never_comes_can_be_stopped(tmp_path, tiny_release):
    """As when the other was refused before they met: torchrun then tells this one to stop."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    alone = {**address, "RANK": "0", "WORLD_SIZE": "2"}
    run = Run(tmp_path / "run", tiny_release, {"topology.split": "1:1"}, environment=alone)
    run.until(lambda: (run.dir / "state.json").exists())
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 0, run.log()
    assert run.state()["phase"] == "stopped"
    assert "Traceback" not in run.log()


def test_a_crash_in_a_thread_is_a_crash_of_the_run_with_its_reason(tmp_path, tiny_release):
    run = Run(tmp_path / "run", tiny_release, {"train.lr": 1e30, "train.warmup_share": 0})
    assert run.ended() == 1
    assert "Traceback" in run.log()
    assert "thread drafter-0 failed: FloatingPointError" in run.log()
    assert any("lower train.lr" in note for note in run.state()["notes"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"train.stepz": 3}, "did you mean train.steps?"),
        ({"target.model": "/nowhere"}, "/nowhere/config.json cannot be read"),
    ],
)
def test_an_expected_refusal_is_one_line_and_exit_code_two(tmp_path, tiny_release, overrides, complaint):
    run = Run(tmp_path / "run", tiny_release, overrides)
    assert run.ended() == 2
    last = run.log().splitlines()[-1]
    assert last.startswith("refused: ")
    assert complaint in last
    assert "Traceback" not in run.log()
