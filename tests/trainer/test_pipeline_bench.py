"""The benchmark of the pipeline runs whole at a small size, and reads a trace as it should."""

from __future__ import annotations

import pytest
import torch

from bench import pipeline, pipeline_processes, pipeline_race
from bench.common import Goals, concluded
from bench.pipeline_parts import Rows, Timed, rows_a_second, run_alone
from bench.pipeline_splits import Tried, misled
from bench.pipeline_trace import crossings, streams
from trainer import compile_watch
from trainer.anchors import allowed_anchors
from trainer.data import Row


@pytest.mark.parametrize("arguments", [["--small"], ["--small", "--split", "2:2", "--rows-per-step", "3"]])
def test_every_section_runs_small(capsys, arguments):
    assert pipeline.main([*arguments, "--steps", "3"]) == 0
    out = capsys.readouterr().out
    for said in (
        "targets alone",
        "drafters alone",
        "efficiency",
        "goal ≥ 95%",
        "recompiles after step 1 (goal 0)",
        "status would say",
        "loss",
        "all sections ran",
    ):
        assert said in out
    assert "FAILED" not in out
    halved = "2:2" in arguments
    assert ("scaling 1:1 -> 2:2" in out and "goal ≥ 1.95 x" in out) is halved


def test_goals_that_are_missed_stand_in_the_last_line_and_a_cpus_rates_are_not_judged(capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "EFFICIENCY", 99.0)
    monkeypatch.setattr(pipeline, "SCALING", 99.0)
    halved = ["--small", "--split", "2:2", "--steps", "2"]
    assert pipeline.main(halved) == 0
    out = capsys.readouterr().out
    assert "goal ≥ 9900%, not judged here" in out and "goal ≥ 198.00 x, not judged here" in out
    assert out.splitlines()[-1] == "all sections ran, all checks held"

    class OnAGpu(Goals):
        judged = property(lambda goals: True, lambda goals, told: None)

    monkeypatch.setattr(pipeline, "Goals", OnAGpu)
    assert pipeline.main(halved) == 0
    missed = "2 goals MISSED: efficiency ≥ 9900%, scaling ≥ 198.00 x"
    assert capsys.readouterr().out.splitlines()[-1] == f"all sections ran, all checks held; {missed}"


def test_a_goal_that_held_is_not_in_the_last_line_and_a_failure_stays_one(capsys):
    goals = Goals()
    assert goals.verdict("rate", "≥ 2", reached=True) == "goal ≥ 2: held"
    assert concluded(list, goals=goals) == 0
    assert goals.verdict("rate", "≥ 3", reached=False) == "goal ≥ 3: MISSED"
    assert concluded(lambda: ["weights"], goals=goals) == 1
    first, second = filter(None, capsys.readouterr().out.splitlines())
    assert first == "all sections ran, all checks held"
    assert second == "FAILED: weights; 1 goal MISSED: rate ≥ 3"


def test_every_split_of_three_devices_is_tried_and_the_advice_held_against_it(capsys):
    assert pipeline.main(["--small", "--splits", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "-- 1:2" in out and "-- 2:1" in out
    assert "goal: the advice leads to the best split found by trying" in out


def test_an_advice_misleads_that_ends_well_below_the_best_split():
    best, near, far = (1, 3), (2, 2), (3, 1)
    assert misled([Tried(best, 100, None), Tried(near, 98, None), Tried(far, 50, near)]) == []
    assert misled([Tried(best, 100, near), Tried(near, 90, None), Tried(far, 50, best)]) == ["1:3", "2:2"]
    assert misled([Tried(best, 100, (4, 0)), Tried(far, 50, best)]) == ["1:3"]  # to one that was not tried


def test_two_processes_get_the_devices_of_one_and_walk_its_losses(capsys):
    four = pipeline_processes.shared_out(["t0", "t1", "d0", "d1"])
    assert four == ["t0", "d0", "t1", "d1"]
    eight = pipeline_processes.shared_out(["t0", "t1", "t2", "t3", "d0", "d1", "d2", "d3"])
    assert eight == ["t0", "t1", "d0", "d1", "t2", "t3", "d2", "d3"]
    code = pipeline_processes.main(["--devices", "cpu,cpu,cpu,cpu", "--steps", "4"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("2 drafters, bit-identical") == 2
    assert "losses differ by" in out


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


class Moment(float):
    """A Stamp whose device's clock is read already."""

    def seconds_until(self, later: Moment) -> float:
        return later - self


def timed(device: str, count: int, began: float, ended: float) -> Timed:
    timer = Timed(torch.device(device), count)
    timer.began, timer.ended = Moment(began), Moment(ended)
    return timer


def test_threads_of_one_card_count_over_its_whole_span_and_cards_add_up():
    card = [timed("cuda:0", 2, 1.0, 3.0), timed("cuda:0", 2, 0.0, 4.0), timed("cuda:0", 2, 0.0, 6.0)]
    assert rows_a_second(card) == pytest.approx(6 / 6)  # a card that takes a second for a row
    assert [timer.seconds for timer in card] == [1, 2, 3]
    other = timed("cuda:1", 2, 100.0, 101.0)  # of another clock
    assert rows_a_second([*card, other]) == pytest.approx(6 / 6 + 2 / 1)


class Noted:
    """A target that writes down which rows it was given."""

    device = torch.device("cpu")

    def __init__(self, seen: list[int], broken: bool = False) -> None:
        self.seen, self.broken = seen, broken

    def features(self, row: Row) -> torch.Tensor:
        self.seen.append(row.index)
        if self.broken:
            raise ArithmeticError("no features")
        return torch.zeros(len(row.ids), 1)


def test_targets_alone_count_only_when_the_first_row_of_each_is_over():
    seen: list[int] = []
    timers = run_alone([Noted(seen) for _ in range(3)], Rows(256, 3, 100), 2)
    assert sorted(seen[:3]) == [0, 1, 2] and sorted(seen) == list(range(9))
    assert all(timer.seconds > 0 for timer in timers) and rows_a_second(timers) > 0


def test_a_target_that_fails_alone_is_told_and_the_others_do_not_wait_for_it():
    with pytest.raises(ArithmeticError, match="no features"):
        run_alone([Noted([]), Noted([], broken=True)], Rows(256, 3, 100), 2)


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


def copy(ts: float, dur: float, source: int, drain: int, size: int) -> dict:
    places = {"fromDevice": source, "inDevice": source, "toDevice": drain, "stream": 20, "bytes": size}
    return {
        "cat": "gpu_memcpy",
        "name": "Memcpy PtoP (Device -> Device)",
        "ts": ts,
        "dur": dur,
        "args": places,
    }


def test_a_copy_between_cards_is_hidden_as_far_as_kernels_run_beside_it():
    def on(device: int, ts: float, dur: float, name: str = "gemm") -> dict:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"device": device, "stream": 7}}

    events = [on(0, 0, 150), on(0, 140, 20), on(1, 180, 20), on(1, 0, 1000, "ncclDevKernel_AllReduce")]
    events += [copy(100, 100, 0, 1, 8 << 20), copy(0, 10, 0, 1, 4), {"ph": "M", "name": "process_name"}]
    (found,) = crossings(events)
    assert (found.way, found.copies, found.size) == ("cuda:0 -> cuda:1", 1, 8 << 20)
    assert found.seconds == pytest.approx(100e-6)
    assert found.beside_source == pytest.approx(0.6)  # from 100 to 160
    assert found.beside_drain == pytest.approx(0.2)  # NCCL's kernel waits rather than works
    assert found.share == pytest.approx(0.1)
    assert crossings([on(0, 0, 10)]) == []
    (stream,) = streams([copy(0, 10, 1, 0, 1), copy(20, 10, 1, 0, 1)], at_least=2)
    assert stream.name == "cuda:1 stream 20"
