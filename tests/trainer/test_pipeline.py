"""Several drafters are one drafter: same rows, same gradients, same bits; and no failure hangs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from trainer.config import load_recipe
from trainer.data import RowOrder, load_corpus, load_tokenizer
from trainer.exchange import checksum
from trainer.geometry import resolve
from trainer.pipeline import Pipeline, StepResult, ThreadFailed
from trainer.replica import Replica
from trainer.target import load_target

CPU = torch.device("cpu")


class Rig:
    """The parts of a run on the tiny target, with as many targets and drafters as asked."""

    def __init__(self, release: Path, *overrides: str) -> None:
        self.recipe = load_recipe("tiny", release, list(overrides))
        self.geometry = resolve(self.recipe)
        data, topology = self.recipe.data, self.recipe.topology
        corpus = load_corpus(
            release / data.train, load_tokenizer(self.recipe.target.model), max_document=data.max_document
        )
        self.order = RowOrder(corpus.documents, budget=data.budget, seed=self.recipe.train.seed)
        loaded, head = load_target(
            self.recipe.target.model, self.geometry, CPU, torch.float32, data.max_document
        )
        self.targets = [loaded] * topology.targets
        self.replicas = [
            Replica(self.recipe, self.geometry, rank, CPU, head) for rank in range(topology.drafters)
        ]
        self.results: list[StepResult] = []
        self.stop = threading.Event()

    def run(self, on_step=None) -> None:
        torch.set_num_threads(1)
        Pipeline(
            self.recipe,
            self.order,
            self.targets,
            self.replicas,
            start_step=0,
            stop=self.stop,
            on_step=on_step or self.results.append,
        ).run(lambda: None)

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        return self.replicas[rank].drafter.state_dict()


@pytest.mark.parametrize(("targets", "drafters"), [(1, 2), (2, 3), (3, 1)])
def test_any_topology_takes_the_steps_of_one_drafter_with_all_rows(tiny_release, targets, drafters):
    sizes = ("train.steps=5", f"topology.targets={targets}", f"topology.drafters={drafters}")
    rig = Rig(tiny_release, *sizes)
    rig.run()

    single = Rig(tiny_release, *sizes)
    replica, target = single.replicas[0], single.targets[0]
    losses = []
    for step in range(5):
        parts = []
        for rank in range(drafters):
            row = single.order.row(step * drafters + rank)
            replica.rank = rank  # the anchors of that drafter; gradients add up in the parameters
            parts.append(replica.backward(row, target.features(row), step))
        denominator = sum(part.denominator for part in parts)
        replica.optimizer.step(step, denominator)
        losses.append(sum(part.numerator for part in parts) / denominator)

    assert [result.loss for result in rig.results] == pytest.approx(losses, rel=1e-5)
    for name, tensor in single.state(0).items():
        assert torch.allclose(rig.state(0)[name], tensor, atol=1e-5), name
    for rank in range(drafters):
        assert checksum(rig.replicas[rank].drafter) == checksum(rig.replicas[0].drafter)
        for name, tensor in rig.state(0).items():
            assert torch.equal(rig.state(rank)[name], tensor), name
    assert rig.results[-1].last


def test_drafters_whose_weights_drift_apart_end_the_run(tiny_release):
    rig = Rig(tiny_release, "train.steps=30", "topology.drafters=2")

    def flip_a_bit(result: StepResult) -> None:
        rig.results.append(result)
        if result.steps_done == 3:
            with torch.no_grad():
                rig.replicas[0].drafter.norm.weight[0] *= 1 + 2e-7

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
    assert checksum(rig.replicas[0].drafter) == checksum(rig.replicas[1].drafter)


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
