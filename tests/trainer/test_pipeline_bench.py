"""The benchmark of the pipeline runs whole at a small size, and reads a trace as it should."""

from __future__ import annotations

import pytest
import torch

from bench import pipeline, pipeline_race
from bench.pipeline_parts import Rows, streams
from trainer import compile_watch
from trainer.anchors import allowed_anchors


@pytest.mark.parametrize("arguments", [["--small"], ["--small", "--split", "2:2", "--rows-per-step", "3"]])
def test_every_section_runs_small(capsys, arguments):
    assert pipeline.main([*arguments, "--steps", "3"]) == 0
    out = capsys.readouterr().out
    for said in (
        "targets alone",
        "drafters alone",
        "efficiency",
        "status would say",
        "loss",
        "all sections ran",
    ):
        assert said in out
    assert "FAILED" not in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_500_steps_of_varied_documents_compile_nothing_after_the_warm_up(capsys):
    one_card = ["--split", "1:2", "--devices", "cuda:0,cuda:0,cuda:0"]
    try:
        assert pipeline.main([*one_card, "--varied-steps", "500"]) == 0, capsys.readouterr().out
    finally:
        compile_watch.allow_recompiles()
    out = capsys.readouterr().out
    assert "0 recompiles after the warm-up" in out and "2 drafters, bit-identical" in out


@pytest.mark.slow
def test_a_start_of_several_threads_without_warm_up_survives():
    assert pipeline_race.race(["cpu"]) == "ok"


def test_rows_vary_and_are_functions_of_their_index():
    rows = Rows(512, 5, 100)
    counts = {int(rows.row(index).doc_ids.max()) + 1 for index in range(12)}
    assert len(counts) > 3
    assert (rows.row(3).ids == Rows(512, 5, 100).row(3).ids).all()
    assert all(allowed_anchors(rows.row(index)).any() for index in range(12))


def kernel(ts: float, dur: float, correlation: int, stream: int = 7) -> dict:
    return {
        "cat": "kernel",
        "ts": ts,
        "dur": dur,
        "args": {"device": 0, "stream": stream, "correlation": correlation},
    }


def launch(ts: float, correlation: int) -> dict:
    return {"cat": "cuda_runtime", "ts": ts, "dur": 5.0, "args": {"correlation": correlation}}


def test_a_gap_is_late_only_as_far_as_its_launch_was():
    events = [launch(0, 1), kernel(10, 100, 1)]
    events += [launch(50, 2), kernel(120, 80, 2)]  # launched in time: the gap of 10 is the device's own
    events += [launch(240, 3), kernel(260, 40, 3)]  # idle from 200, launched at 245: 45 late, 15 not
    events += [launch(50_000, 4), kernel(50_010, 90, 4)]  # a wait for the other side
    (found,) = streams(events, at_least=1)
    span = 50_100 - 10
    assert found.kernels == 4
    assert found.busy == pytest.approx(310 / span)
    assert found.late == pytest.approx(45 / span)
    assert streams(events, at_least=5) == []
