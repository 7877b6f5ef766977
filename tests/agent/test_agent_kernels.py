"""A target that would crawl is refused while the old run still lives, and goes on only when told to."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agent import cache, interpreter
from agent.call import Refusal

ROW = "0, NVIDIA H200, 580.1, 1000, 143771, 5, 40, 200.0, 700.0"
LINE = {"role": "recurrence", "function": "fla.chunk", "milliseconds": 2.0, "reference_milliseconds": 30.0}


def proof(**line):
    return {"ok": True, "reports": [{"device": "cuda:0", "lines": [{**LINE, **line}]}]}


FAST = {"proof": proof(fast=True, why="", mend="")}
SLOW = {
    "proof": proof(
        fast=False, why="fla is not installed", mend="python -m pip install flash-linear-attention"
    ),
    "proof_code": 9,
}
FULL = {"proof": {"ok": False, "error": "cuda:0 has 0.1 of 80.0 GiB free"}, "proof_code": 3}
BROKEN = {"proof": "dies"}


@pytest.fixture
def on_gpu(ready):
    """A box whose nvidia-smi answers; the proof itself is the stand-in's."""
    folder = ready.base / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{ROW}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    ready.environment["PATH"] = f"{folder}:{ready.environment['PATH']}"
    return ready


def notes(answer):
    return " ".join(note["text"] for note in answer.notes)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_without_a_gpu_there_is_nothing_to_prove(ready):
    assert ready.start(recipe=BROKEN).result["run"] == "r-0001"


def test_a_dense_target_is_not_asked(on_gpu):
    answer = on_gpu.start()
    assert answer.result["run"] == "r-0001"
    assert "proving" not in notes(answer)


def test_what_the_proof_tunes_is_what_the_run_finds(on_gpu):
    answer = on_gpu.start(recipe=FAST)
    assert "proving the target's kernels on the GPU" in notes(answer)
    record = on_gpu.file("r-0001", "run.json")
    assert record["cache"]["choice"] == "kept"
    assert record["allow_slow_kernels"] is False
    assert record["env"]["TRITON_CACHE_AUTOTUNING"] == record["env"]["FLA_CACHE_RESULTS"] == "1"
    assert record["env"]["FLA_DISABLE_TENSOR_CACHE"] == "1"


def test_a_restart_onto_slow_kernels_leaves_the_old_run_alone(on_gpu):
    on_gpu.start(recipe=FAST)
    refused = on_gpu.start(verb="restart", recipe=SLOW).error
    assert refused["kind"] == "kernels"
    assert refused["message"].endswith("would run on fla.chunk: fla is not installed")
    assert refused["hint"].startswith("python -m pip install flash-linear-attention")
    assert "--allow-slow-kernels" in refused["hint"]
    assert "stop" not in refused
    assert on_gpu.scope("r-0001")
    assert not (on_gpu.run_dir("r-0001") / "stop.json").exists()

    allowed = on_gpu.start(verb="restart", recipe=SLOW, allow_slow_kernels=True).result
    assert allowed["stop"]["run"] == "r-0001"
    assert on_gpu.file(allowed["start"]["run"], "run.json")["allow_slow_kernels"] is True


def test_a_gpu_too_full_beside_the_old_run_is_left_to_the_run_itself(on_gpu):
    answer = on_gpu.start(recipe=FULL)
    assert answer.result["run"] == "r-0001"
    assert "not proven now, the run will do it: cuda:0 has 0.1 of 80.0 GiB free" in notes(answer)


def test_a_proof_that_breaks_is_a_refusal_in_its_own_words(on_gpu):
    error = on_gpu.start(recipe=BROKEN).error
    assert error["kind"] == "kernels"
    assert error["message"] == "RuntimeError: no CUDA device is usable"


def test_a_deploy_onto_slow_kernels_does_not_switch(on_gpu):
    before = on_gpu.current()
    files = on_gpu.payload(**{"recipes/other.yaml": "{}"})
    wishes = {"recipe": "tiny", "overrides": SLOW}
    assert on_gpu.deploy(files, **wishes).error["kind"] == "kernels"
    assert on_gpu.current() == before
    assert not list((Path(on_gpu.roots["opt"]) / "releases").glob(".*"))

    assert on_gpu.deploy(files, **wishes, allow_slow_kernels=True).result["kernels"] == []
    assert on_gpu.current() != before
    again = on_gpu.payload(**{"recipes/third.yaml": "{}"})
    proven = on_gpu.deploy(again, recipe="tiny", overrides=FAST).result["kernels"]
    assert proven == ["recurrence by fla.chunk, 15.0 times the reference"]


def test_a_recipe_that_is_wrong_does_not_keep_a_release_out(on_gpu):
    files = on_gpu.payload(**{"recipes/other.yaml": "{}"})
    assert on_gpu.deploy(files, recipe="no-such").result["outcome"] == "deployed"


def test_whatever_makes_a_kernel_stale_makes_another_cache(ready):
    place = Path(ready.roots["opt"]) / "releases" / ready.current()
    versions = interpreter.versions(ready.python)
    assert {"python", "torch", "triton", "flash-linear-attention", "fla-core"} <= set(versions)
    card = {"name": "NVIDIA H200", "driver": "580.1"}
    keys = [
        cache.make_key({**versions, **changed}, {"status": "ok", "rows": [{**card, **row}]}, str(place))[
            "key"
        ]
        for changed, row in (
            ({}, {}),
            ({"triton": "9.9"}, {}),
            ({"fla-core": "9.9"}, {}),
            ({"torch": "9.9"}, {}),
            ({}, {"driver": "999.1"}),
            ({}, {"name": "NVIDIA B200"}),
        )
    ]
    assert len(set(keys)) == len(keys)


def test_where_the_driver_hangs_no_proof_is_tried_and_the_start_goes_on(on_gpu):
    (on_gpu.base / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    answer = on_gpu.start(recipe=BROKEN)
    assert answer.result["run"] == "r-0001"
    assert "the kernels are not proven now: nvidia-smi does not answer; invoke doctor" in notes(answer)


def test_an_interpreter_that_even_a_kill_does_not_end_is_left(monkeypatch):
    """As one that hangs in a driver does."""
    stuck = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        monkeypatch.setattr(stuck, "kill", lambda: None)
        monkeypatch.setattr(interpreter, "KILLED_S", 0.1)
        with pytest.raises(Refusal, match=r"the proof did not end in 0\.1 s"):
            interpreter._end(stuck, "the proof", 0.1)
        assert stuck.poll() is None
    finally:
        monkeypatch.undo()
        stuck.kill()
        stuck.wait()


def test_a_reference_that_is_faster_is_told_in_milliseconds_and_a_package_without_use_by_name(on_gpu):
    why = "flash-qla: RuntimeError: nvcc is not there"
    recipe = {"proof": proof(fast=True, why=why, mend="", milliseconds=0.86, reference_milliseconds=0.66)}
    files = on_gpu.payload(**{"recipes/other.yaml": "{}"})
    proven = on_gpu.deploy(files, recipe="tiny", overrides=recipe).result["kernels"]
    assert proven == [f"recurrence by fla.chunk, 0.86 ms, the reference 0.66; {why}"]
