"""Any split takes the same steps: same rows, same gradients, same bits on all; and no failure hangs."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from trainer import checkpoint, compile_watch, fx_threads, islands, pipeline, watchdog
from trainer.config import config_hash, load_recipe
from trainer.data import RowOrder, load_corpus, load_tokenizer
from trainer.exchange import checksum
from trainer.geometry import resolve
from trainer.pipeline import Pipeline, StepResult, ThreadFailed
from trainer.replica import Replica
from trainer.target_loading import load_target

CPU = torch.device("cpu")


class Rig:
    """The parts of a run on the tiny target, with as many targets and drafters as asked; targets on the CPU,
    drafters on `device`."""

    def __init__(self, release: Path, *overrides: str, device: torch.device = CPU) -> None:
        self.recipe = load_recipe("tiny", release, list(overrides))
        self.geometry = resolve(self.recipe)
        data = self.recipe.data
        targets, drafters = self.recipe.topology.named or (1, 1)
        corpus = load_corpus(
            release / data.train, load_tokenizer(self.recipe.target.model), max_document=data.max_document
        )
        self.order = RowOrder(corpus.documents, budget=data.budget, seed=self.recipe.train.seed)
        loaded, head = load_target(
            self.recipe.target.model, self.geometry, CPU, torch.float32, data.max_document
        )
        self.targets = [loaded] * targets
        head = head.to(device, torch.float32)
        self.replicas = [Replica(self.recipe, self.geometry, rank, device, head) for rank in range(drafters)]
        self.results: list[StepResult] = []
        self.stop = threading.Event()

    def run(self, on_step=None, while_running=lambda: None, **more) -> None:
        torch.set_num_threads(1)
        Pipeline(
            self.recipe,
            self.order,
            self.targets,
            self.replicas,
            stop=self.stop,
            on_step=on_step or self.results.append,
            **{"start_step": 0, **more},
        ).run(while_running)

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        return self.replicas[rank].drafter.state_dict()


@pytest.mark.parametrize("split", ["1:1", "1:2", "2:3", "3:5"])
def test_any_split_takes_the_steps_of_one_drafter_with_all_rows(tiny_release, split):
    rows = 4  # for three drafters unequal shares, for five a drafter without any
    recipe = ("train.steps=5", f"train.rows_per_step={rows}", f"topology.split={split}")
    rig = Rig(tiny_release, *recipe)
    rig.run()

    single = Rig(tiny_release, *recipe)
    replica, target = single.replicas[0], single.targets[0]
    losses = []
    for step in range(5):
        sums = 0
        for index in range(step * rows, (step + 1) * rows):
            row = single.order.row(index)
            sums = sums + replica.backward(row, target.features(row)).numbers
        replica.optimizer.step(step, sums[1])
        losses.append(float(sums[0] / sums[1]))

    assert [result.loss for result in rig.results] == pytest.approx(losses, rel=1e-5)
    for name, tensor in single.state(0).items():
        assert torch.allclose(rig.state(0)[name], tensor, atol=1e-5), name
    for other in rig.replicas[1:]:
        assert torch.equal(other.storage.weights, rig.replicas[0].storage.weights)
    assert rig.results[-1].last


def test_a_run_goes_on_with_other_splits_as_if_it_had_never_stopped(tiny_release, tmp_path):
    """Two drafters, then one, then three. Only the order in which fp32 gradients are summed differs."""
    recipe = ("train.steps=12", "train.rows_per_step=6")
    whole = Rig(tiny_release, *recipe, "topology.split=1:2")
    whole.run()

    losses, rows = [], []

    def go_on(split: str, start: int, end: int) -> Rig:
        rig = Rig(tiny_release, *recipe, f"topology.split={split}")
        config = {"config_hash": config_hash(rig.recipe), "data_sha256": "same"}
        if start:
            path = tmp_path / f"step-{start:06d}"
            assert checkpoint.check(path, config) == start
            for replica in rig.replicas:
                checkpoint.load(path, start, replica.drafter, replica.optimizer)
        honest = rig.order.row
        rig.order.row = lambda index: rows.append(index) or honest(index)

        def on_step(result: StepResult) -> None:
            losses.append(result.loss)
            if result.steps_done == end - 1:
                rig.stop.set()
            if result.last:
                leader = rig.replicas[0]
                checkpoint.save(tmp_path, end, leader.drafter, leader.optimizer, config, keep=3)

        rig.run(on_step, start_step=start)
        del rows[end * 6 :]  # the loader was ahead of the stop
        return rig

    go_on("1:2", 0, 4)
    go_on("2:1", 4, 8)
    last = go_on("1:3", 8, 12)
    assert rows == list(range(12 * 6))
    assert losses == pytest.approx([result.loss for result in whole.results], rel=2e-6)
    assert losses[:4] == [result.loss for result in whole.results[:4]]  # the same split: the same bits
    for name, tensor in whole.state(0).items():
        assert torch.allclose(last.state(0)[name], tensor, atol=1e-5), name
    moments = whole.replicas[0].optimizer.tensors()
    for name, tensor in last.replicas[0].optimizer.tensors().items():
        assert torch.allclose(moments[name], tensor, rtol=1e-3, atol=1e-7), name


def test_drafters_whose_weights_drift_apart_end_the_run(tiny_release):
    rig = Rig(tiny_release, "train.steps=30", "topology.drafters=2")

    def flip_a_bit(result: StepResult) -> None:
        rig.results.append(result)
        if result.steps_done == 3:
            with torch.no_grad():
                rig.replicas[0].storage.weights[5] *= 1 + 2e-7

    with pytest.raises(ThreadFailed, match=r"weights differ before step 21"):
        rig.run(flip_a_bit)
    assert len(rig.results) == 20


def test_a_stop_ends_after_the_step_in_flight_on_every_drafter(tiny_release):
    rig = Rig(tiny_release, "train.steps=1000", "topology.drafters=2", "topology.targets=2")

    def stop_at_four(result: StepResult) -> None:
        rig.results.append(result)
        if result.steps_done == 4:
            rig.stop.set()

    rig.run(stop_at_four)
    assert [result.steps_done for result in rig.results] == [1, 2, 3, 4, 5]
    assert [result.last for result in rig.results] == [False] * 4 + [True]
    assert checksum(rig.replicas[0].storage.weights) == checksum(rig.replicas[1].storage.weights)


class Paced:
    """A target that notes its rows and, before each, does what it is told."""

    def __init__(self, target, before) -> None:
        self.device, self.rows = target.device, []
        self._target, self._before = target, before

    def features(self, row):
        self._before()
        self.rows.append(row.index)
        return self._target.features(row)


def test_a_target_that_is_faster_computes_more_rows_and_the_steps_stay_the_same(tiny_release):
    recipe = ("train.steps=10", "train.rows_per_step=4", "topology.split=2:2", "topology.queue_rows=4")
    even = Rig(tiny_release, *recipe)
    even.run()

    rig = Rig(tiny_release, *recipe)
    changed = threading.Condition()

    def after_three_rows_of_the_other() -> None:
        with changed:
            enough = len(quick.rows) + 3
            assert changed.wait_for(lambda: len(quick.rows) >= enough or ended(), 900)

    def ended() -> bool:
        return len(slow.rows) + len(quick.rows) >= 10 * 4 - 1

    def tell() -> None:
        with changed:
            changed.notify_all()

    slow, quick = (
        Paced(target, before)
        for target, before in zip(rig.targets, (after_three_rows_of_the_other, tell), strict=True)
    )
    rig.targets = [slow, quick]
    rig.run(while_running=tell)

    assert sorted(slow.rows + quick.rows) == list(range(10 * 4))
    assert len(quick.rows) > 2 * len(slow.rows) > 0
    assert [result.loss for result in rig.results] == [result.loss for result in even.results]
    assert torch.equal(rig.replicas[1].storage.weights, even.replicas[1].storage.weights)


@pytest.mark.parametrize("where", ["loader", "target-0", "drafter-1"])
def test_a_failure_in_any_thread_ends_the_run_and_names_it(tiny_release, monkeypatch, where):
    rig = Rig(tiny_release, "train.steps=1000", "topology.drafters=2")
    victim, method = {
        "loader": (rig.order, "row"),
        "target-0": (rig.targets[0], "features"),
        "drafter-1": (rig.replicas[1], "backward"),
    }[where]
    honest, calls = getattr(victim, method), []

    def fails_at_the_sixth(*arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise MemoryError("no more")
        return honest(*arguments)

    monkeypatch.setattr(victim, method, fails_at_the_sixth)
    with pytest.raises(ThreadFailed, match=rf"thread {where} failed: MemoryError: no more") as failed:
        rig.run()
    assert isinstance(failed.value.__cause__, MemoryError)
    assert not [t for t in threading.enumerate() if t.name.startswith(("loader", "target", "drafter"))]


def test_a_loss_that_is_no_number_ends_the_run_with_the_mend(tiny_release):
    rig = Rig(tiny_release, "train.steps=50", "train.lr=1e30", "train.warmup_share=0")
    with pytest.raises(ThreadFailed, match=r"thread drafter-0 failed: .*at step \d+: lower train\.lr"):
        rig.run()


def test_no_number_before_any_update_is_not_blamed_on_the_rate(tiny_release, monkeypatch):
    rig = Rig(tiny_release, "train.steps=50")
    honest = rig.targets[0].features
    monkeypatch.setattr(rig.targets[0], "features", lambda row: honest(row) * float("nan"))
    with pytest.raises(ThreadFailed, match=r"at step 1, the run's first: the target's features are no numb"):
        rig.run()


def test_numbers_read_one_step_late_are_the_same_and_where_it_matters_the_weights_stand_still(
    tiny_release, monkeypatch
):
    """The order in which a GPU's steps are told, tried on a CPU."""

    def run(**more) -> tuple[list[tuple], dict[int, float]]:
        rig, norms = Rig(tiny_release, "train.steps=9", "topology.split=1:2"), {}

        def on_step(result: StepResult) -> None:
            rig.results.append(result)
            norms[result.steps_done] = float(rig.replicas[0].storage.weights.norm())

        rig.run(on_step, **more)
        return [(r.steps_done, r.loss, r.grad_norm, r.tokens, r.last) for r in rig.results], norms

    facts, truth = run()
    monkeypatch.setattr(pipeline, "_reads_late", lambda device: True)
    late_facts, told = run(stands_still=lambda steps_done: steps_done in (4, 5))
    assert late_facts == facts
    assert [step for step in told if told[step] == truth[step]] == [4, 5, 9]
    assert told[2] == truth[3]  # told when step 3 was done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_drafters_on_one_gpu_take_the_steps_of_the_cpu(tiny_release):
    recipe = ["train.steps=25", "train.rows_per_step=3", "train.anchors=32", "topology.split=1:2"]
    recipe.append("drafter.head_dim=16")  # flex takes no smaller heads
    truth = Rig(tiny_release, *recipe)
    truth.run()
    torch.set_num_threads(1)  # Dynamo's guards look at it
    rig = Rig(tiny_release, *recipe, device=torch.device("cuda", 0))
    fx_threads.install()
    for replica in rig.replicas:
        replica.drafter.islands = islands.compiled(replica.device)
        replica.warm_up(rig.order.row(0))
    compile_watch.forbid_recompiles()
    try:
        rig.run(stands_still=lambda steps_done: steps_done == 7)
    finally:
        compile_watch.allow_recompiles()
    assert [result.steps_done for result in rig.results] == list(range(1, 26))
    assert [r.tokens for r in rig.results] == [r.tokens for r in truth.results]
    assert [r.loss for r in rig.results] == pytest.approx([r.loss for r in truth.results], rel=2e-3)
    assert torch.equal(rig.replicas[0].storage.weights, rig.replicas[1].storage.weights)
    last = rig.results[-1]
    assert 0 < last.busy["drafter-0"] <= 1 and last.costs.drafter_row > 0


def test_a_loss_that_is_no_number_is_told_one_step_later_when_read_late(tiny_release, monkeypatch):
    monkeypatch.setattr(pipeline, "_reads_late", lambda device: True)
    rig = Rig(tiny_release, "train.steps=50", "train.lr=1e30", "train.warmup_share=0", "topology.split=1:1")
    with pytest.raises(ThreadFailed, match=r"at step 2: lower train\.lr"):
        rig.run()
    assert len(rig.results) == 1


def test_shares_and_costs_are_measured(tiny_release):
    rig = Rig(tiny_release, "train.steps=12", "topology.split=2:2")
    rig.run()
    last = rig.results[-1]
    assert set(last.busy) == {"loader", "target-0", "target-1", "drafter-0", "drafter-1"}
    assert 0 <= last.busy.pop("loader") <= 1
    assert all(0 < share <= 1 for share in last.busy.values())
    slowest = max(result.step_s for result in rig.results)  # costs are medians, one step may be quick
    assert 0 < last.costs.target_row < slowest * 2
    assert 0 < last.costs.drafter_row < slowest * 2
    assert 0 < last.costs.drafter_step < slowest


def test_a_thread_that_hangs_is_named_with_its_stack(tiny_release, monkeypatch, capsys):
    rig = Rig(tiny_release, "train.steps=1000", "topology.split=1:2")
    monkeypatch.setattr(watchdog, "FLOOR_S", 2.0)
    monkeypatch.setattr(watchdog, "FACTOR", 1.0)
    honest, enough = rig.targets[0].features, threading.Event()

    def hangs_in_a_library(row):
        if row.index == 7:
            enough.wait(60)
            rig.stop.set()
        return honest(row)

    monkeypatch.setattr(rig.targets[0], "features", hangs_in_a_library)
    said = ""

    def listen():
        nonlocal said
        said += capsys.readouterr().out
        if "stack of" in said:
            enough.set()

    rig.run(while_running=listen)
    assert "no thread has moved for" in said
    assert "target-0: features of row 7, for" in said
    assert "in hangs_in_a_library" in said
    assert "drafter-0:" not in said  # it only waits
    assert said.count("no thread has moved") == 1


def test_a_failure_beside_a_thread_that_hangs_is_told_although_the_run_cannot_end(tiny_release, monkeypatch):
    rig = Rig(tiny_release, "train.rows_per_step=8", "topology.split=2:1", "topology.queue_rows=4")
    monkeypatch.setattr(watchdog, "FLOOR_S", 2.0)
    monkeypatch.setattr(watchdog, "FACTOR", 1.0)
    honest, told, enough = rig.targets[0].features, [], threading.Event()

    def hangs_or_fails(row):
        if row.index == 3:
            enough.wait(900)
        if row.index == 5:
            raise MemoryError("no more\nand much about it")
        return honest(row)

    def listen(text, **_):
        told.append(text)
        if "failed with" in text:
            enough.set()

    monkeypatch.setattr(rig.targets[0], "features", hangs_or_fails)
    monkeypatch.setattr(pipeline, "print", listen, raising=False)
    with pytest.raises(ThreadFailed, match=r"thread target-\d failed: MemoryError: no more"):
        rig.run()
    assert "no thread has moved for" in told[-1]
    assert re.search(r"^  target-\d: failed with MemoryError: no more, for \d+ s$", told[-1], re.M)
    assert re.search(r"^  target-\d: features of row 3, for \d+ s$", told[-1], re.M)
    assert "in hangs_or_fails" in told[-1]
