"""Gradients of all drafters become one sum, the same bits on every replica.

Within a process the drafters meet at one barrier and the last to arrive acts for all: between distinct GPUs
it enqueues NCCL's all-reduce on every drafter's stream, in one group (one thread, so nothing can lock up);
on shared devices and on the CPU it adds in rank order and copies. Streams wait for each other through
events; no host waits for a device. Between processes the sums of their first drafters are added by
torch.distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.channel import Closed
from trainer.world import ALONE, World

_CHUNK = 1 << 24  # elements of a flat tensor that travel at a time: a copy of all would be 7 GB at 27B


@dataclass(frozen=True)
class _Share:
    """What a rank brought: `tensors` to be summed in place, its stream, and a note for the others."""

    tensors: list[Tensor]
    stream: torch.cuda.Stream | None
    note: Any


class Exchange:
    """The rendezvous of the D drafter threads on `devices`, D in rank order."""

    def __init__(
        self,
        devices: list[torch.device],
        world: World = ALONE,
        at_rendezvous: Callable[[], None] = lambda: None,
    ) -> None:
        self._devices, self._world, self._at_rendezvous = devices, world, at_rendezvous
        self._shares: list[_Share | None] = [None] * len(devices)
        self._notes: list[Any] = []
        self._barrier = threading.Barrier(len(devices), action=self._act)
        probes = [torch.zeros(1, device=device) for device in devices]
        self.means = self._choose(probes)
        if self.means == "nccl":
            torch.cuda.nccl.all_reduce(probes)  # makes the communicators: seconds, and it synchronises

    def _choose(self, probes: list[Tensor]) -> str:
        if len(probes) == 1:
            return "none"
        if all(probe.is_cuda for probe in probes) and torch.cuda.nccl.is_available(probes):
            return "nccl"
        return "adds"

    def abort(self) -> None:
        """Wake whoever waits, with Closed."""
        self._barrier.abort()

    def reduce(self, rank: int, tensors: list[Tensor], note: Any = None) -> list[Any]:
        """Sum `tensors` over all drafters of all processes, in place on each; returns the notes of this
        process in rank order. On CUDA the sums are there for what the current stream does next.

        Raises Closed when the run ends meanwhile.
        """
        device = self._devices[rank]
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._shares[rank] = _Share(tensors, stream, note)
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Closed from None
        return self._notes  # of this meeting: the next one needs this rank

    @torch.no_grad()
    def _act(self) -> None:
        shares = [share for share in self._shares if share is not None]
        with ExitStack() as streams:
            for share in reversed(shares):  # the leader's last, so that its device is the current one
                if share.stream is not None:
                    streams.enter_context(torch.cuda.stream(share.stream))
            if self.means == "nccl":
                self._sum_by_nccl(shares)
            else:
                self._sum_by_adding(shares)
        self._notes = [share.note for share in shares]
        self._at_rendezvous()

    def _sum_by_nccl(self, shares: list[_Share]) -> None:
        nccl, streams = torch.cuda.nccl, [share.stream for share in shares]
        for tensors in zip(*(share.tensors for share in shares), strict=True):
            if self._world.size == 1:
                nccl.all_reduce(tensors, streams=streams)
            else:
                nccl.reduce(tensors, streams=streams)
                self._world.add(tensors[0])
                nccl.broadcast(tensors, streams=streams)

    def _sum_by_adding(self, shares: list[_Share]) -> None:
        leader, *others = shares
        for other in others:
            _follow(leader.stream, other.stream)
        for tensors in zip(*(share.tensors for share in shares), strict=True):
            total, *rest = tensors
            for tensor in rest:
                for part, more in zip(total.split(_CHUNK), tensor.split(_CHUNK), strict=True):
                    part.add_(more.to(total.device, non_blocking=True))
            self._world.add(total)
            for tensor in rest:
                tensor.copy_(total, non_blocking=True)
        for other in others:
            _follow(other.stream, leader.stream)


def _follow(later: torch.cuda.Stream | None, earlier: torch.cuda.Stream | None) -> None:
    if later is not None and earlier is not None:
        later.wait_stream(earlier)


def checksum(weights: Tensor) -> Tensor:
    """A 0-d int64 sum over the bits of fp32 `weights`: one flipped bit changes it; nothing waits for it."""
    return weights.detach().view(torch.int32).sum(dtype=torch.int64)
