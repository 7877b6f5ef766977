"""Sums are the same bits on every rank, in any order of arrival, over threads and over processes."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from trainer.channel import Closed
from trainer.clock import EXCHANGE, ROW, Clock
from trainer.exchange import Exchange, checksum
from trainer.handoff import Inbox, own_stream, send
from trainer.readout import Readout
from trainer.world import World

CPU = torch.device("cpu")
PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def tensors(rank: int, device: torch.device = CPU) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    flat = torch.randn(1000, generator=draw).to(device)
    return [flat, torch.full((5,), rank + 0.5, dtype=torch.float64, device=device)]


def meet(devices: list[torch.device], rounds: int = 5) -> tuple[list[list[torch.Tensor]], Exchange]:
    """Each rank in its thread brings `tensors(rank + round)`; arrival is random."""
    exchange = Exchange(devices)
    results: list[list[torch.Tensor]] = [[] for _ in devices]

    def body(rank: int) -> None:
        with own_stream(devices[rank]):
            for turn in range(rounds):
                time.sleep(random.random() / 100)
                mine = tensors(rank + turn, devices[rank])
                notes = exchange.reduce(rank, mine, note=(turn, rank))
                assert notes == [(turn, other) for other in range(len(devices))]
                results[rank] += [tensor.cpu() for tensor in mine]

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, exchange


def expected(ranks: int, rounds: int = 5) -> list[torch.Tensor]:
    sums = []
    for turn in range(rounds):
        first, *others = (tensors(rank + turn) for rank in range(ranks))
        for other in others:  # in rank order, as fp32 sums depend on it
            first = [a + b for a, b in zip(first, other, strict=True)]
        sums += first
    return sums


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_the_sum_in_rank_order_whoever_comes_first(ranks):
    results, _ = meet([CPU] * ranks)
    for mine in results:
        assert len(mine) == 10
        assert all(torch.equal(a, b) for a, b in zip(mine, expected(ranks), strict=True))


@pytest.mark.gpu
@CUDA
def test_drafters_on_one_gpu_add_without_nccl():
    results, exchange = meet([torch.device("cuda", 0)] * 3)
    assert exchange.means == "adds"
    for mine in results:
        assert all(torch.equal(a, b) for a, b in zip(mine, expected(3), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("names", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0", "cuda:1")])
def test_drafters_on_several_gpus_agree_to_the_bit(names):
    results, exchange = meet([torch.device(name) for name in names])
    assert exchange.means == ("nccl" if len(set(names)) == len(names) else "adds")
    for mine in results:
        assert all(torch.equal(a, b) for a, b in zip(mine, results[0], strict=True))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, expected(len(names)), strict=True))


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("source", range(2))
def test_features_arrive_whole_while_both_sides_go_on(source):
    """The target overwrites nothing that travels, the drafter reads nothing that has not arrived."""
    if source >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    here, there = torch.device("cuda", 0), torch.device("cuda", source)
    inbox, found = Inbox(here), []
    with own_stream(there):
        deliveries = []
        for number in range(8):
            slow = torch.randn(2048, 2048, device=there)
            for _ in range(20):
                slow = slow @ slow / 2048
            features = torch.full((512, 1024), float(number), device=there) + 0 * slow.sum()
            deliveries.append(send(None, features))
    with own_stream(here):
        for delivery in deliveries:
            features = inbox.take(delivery)
            found.append(Readout(features.sum(dtype=torch.float64)))
            inbox.release()
    assert [value for readout in found for value in readout.values()] == [n * 512 * 1024 for n in range(8)]


def test_two_drafters_of_two_processes_each_meet_by_nccl_then_between_the_leaders(monkeypatch):
    """The order of the three steps and who brings what; NCCL itself stands in, for it needs four GPUs."""
    calls = []

    def reduce(tensors, streams):
        calls.append("reduce")
        tensors[0].add_(tensors[1])
        tensors[1].fill_(float("nan"))  # NCCL leaves there what it likes

    def broadcast(tensors, streams):
        calls.append("broadcast")
        tensors[1].copy_(tensors[0])

    class OtherProcess(World):
        def add(self, tensor: torch.Tensor) -> None:
            calls.append("add")
            tensor.add_(100.0)

        def any(self, mine: bool) -> bool:
            return mine

    monkeypatch.setattr(torch.cuda.nccl, "reduce", reduce)
    monkeypatch.setattr(torch.cuda.nccl, "broadcast", broadcast)
    exchange = Exchange([CPU, CPU], OtherProcess(rank=0, size=2))
    exchange.means = "nccl"
    mine = [[torch.full((3,), float(rank + 1)), torch.ones(1)] for rank in range(2)]
    threads = [threading.Thread(target=exchange.reduce, args=(rank, mine[rank])) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert calls == ["reduce", "add", "broadcast"] * 2
    assert [[t.tolist() for t in tensors] for tensors in mine] == [[[103.0] * 3, [102.0]]] * 2


def test_an_abort_wakes_whoever_waits():
    exchange = Exchange([CPU, CPU])
    woken = []

    def waits() -> None:
        with pytest.raises(Closed):
            exchange.reduce(0, tensors(0))
        woken.append(True)

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.05)
    exchange.abort()
    thread.join(60)
    assert woken


def test_a_flipped_bit_changes_the_checksum():
    weights = torch.randn(10_000)
    before = int(checksum(weights))
    weights.view(torch.int32)[1234] ^= 1
    assert int(checksum(weights)) == before + (1 if weights.view(torch.int32)[1234] & 1 else -1)


def test_a_clock_counts_work_and_leaves_out_the_wait_for_others(monkeypatch):
    now = itertools.count()  # a second passes between two looks at the time
    monkeypatch.setattr("trainer.clock.time.perf_counter", lambda: float(next(now)))
    clock = Clock()
    for _ in range(4):
        with clock.work(ROW):
            pass
        with clock.work(EXCHANGE):
            next(now), next(now)
    assert clock.share() == pytest.approx(4 / 20)  # from the first begin to the last
    assert clock.seconds(ROW) == 1
    assert clock.seconds(EXCHANGE) == 3
    assert clock.seconds("none such") is None
    assert Clock().share() is None


TWO = """
import sys, torch
from trainer import world
from trainer.exchange import Exchange, checksum
rank = int(__import__("os").environ["RANK"])
here = world.join(rank, 2, torch.device("cpu"))
tensor = torch.full((4,), rank + 1.0)
Exchange([torch.device("cpu")], here).reduce(0, [tensor])
same, odd = torch.ones(3), torch.ones(3) + rank
spread = here.spread(checksum(same)).tolist(), here.spread(checksum(odd)).tolist()
seen = [tensor.tolist(), here.any(rank == 1), here.any(False)]
seen += [len(set(spread[0])), len(set(spread[1])), spread[1][0] > spread[1][1]]
# two processes share one stdout
__import__("pathlib").Path(sys.argv[1], str(rank)).write_text(" ".join(map(str, seen)))
here.close()
"""


def test_two_processes_add_vote_and_compare(tmp_path):
    program = tmp_path / "two.py"
    program.write_text(TWO)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(program),
            str(tmp_path),
        ],
        cwd=PAYLOAD,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PAYLOAD)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert seen == ["[3.0, 3.0, 3.0, 3.0] True False 1 2 True"] * 2
