"""Gradients of all drafters become one sum, the same bits on every replica, inside one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from trainer.channel import Closed
from trainer.drafter import Drafter


class Exchange:
    """A rendezvous of D drafter threads. The sum runs in rank order, so it does not depend on who arrives
    first."""

    def __init__(self, replicas: list[Drafter], at_rendezvous: Callable[[], None] = lambda: None) -> None:
        self._parameters = [list(replica.parameters()) for replica in replicas]
        self._slots: list[Any] = [None] * len(replicas)
        self._ready = threading.Barrier(len(replicas))
        self._summed = threading.Barrier(len(replicas), action=at_rendezvous)

    def abort(self) -> None:
        """Wake whoever waits, with Closed."""
        self._ready.abort()
        self._summed.abort()

    def reduce(self, rank: int, contribution: Any) -> list[Any]:
        """Sum the replicas' gradients in place on all of them; returns every rank's `contribution`, in rank
        order.

        Each rank sums its share of the parameters. Raises Closed when the run ends meanwhile.
        """
        self._slots[rank] = contribution
        self._wait(self._ready)
        contributions = list(self._slots)
        for replicas in list(zip(*self._parameters, strict=True))[rank :: len(self._slots)]:
            first, *others = [p.grad for p in replicas]
            for other in others:
                first.add_(other.to(first.device))
            for other in others:
                other.copy_(first)
        self._wait(self._summed)
        return contributions

    def _wait(self, barrier: threading.Barrier) -> None:
        if torch.cuda.is_available():  # another thread's stream reads these gradients next
            torch.cuda.current_stream().synchronize()
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            raise Closed from None


def checksum(drafter: Drafter) -> int:
    """A sum over the bits of all weights: equal weights give equal sums, and one flipped bit changes it."""
    return sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in drafter.parameters())
