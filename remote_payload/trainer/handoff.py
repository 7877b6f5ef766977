"""Features go from a target's thread to a drafter's; no host waits, copies between GPUs run beside both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import Row


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """`device` is the current one, as it is in a role's thread: compilers and hand-made kernels may look."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's kernels on a stream of its own, so that two roles on one GPU overlap; nothing on the
    CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def empty_cache(device: torch.device) -> None:
    """Give back what torch keeps of another stream's memory: a thread's own stream could not use it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Delivery:
    """A row and its features [T, K*H] on the target's device; `ready` marks their end on the target's
    stream."""

    row: Row
    features: Tensor
    ready: torch.cuda.Event | None


def send(row: Row, features: Tensor) -> Delivery:
    ready = None
    if features.is_cuda:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(features.device))
    return Delivery(row, features, ready)


class Inbox:
    """Where one drafter's features arrive: two buffers on its GPU, so that row n+1 travels while n is used.

    A copy is enqueued as soon as the drafter's host, one row ahead of its GPU, has the delivery. It runs on
    side streams of both GPUs, after the features are ready and the buffer is free, and neither the target's
    next forward nor the drafter's backward waits for it. On one device there is nothing to copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None, None]
        self._free: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._out: dict[torch.device, torch.cuda.Stream] = {}
        self._in = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, delivery: Delivery) -> Tensor:
        """The features on this device, for the current stream, until `release`."""
        if delivery.ready is None:
            return delivery.features.to(self._device)
        stream = torch.cuda.current_stream(self._device)
        if delivery.features.device == stream.device:
            stream.wait_event(delivery.ready)
            delivery.features.record_stream(stream)
            return delivery.features
        features, arrived = self._fetch(delivery.features, delivery.ready)
        stream.wait_event(arrived)
        return features

    def release(self) -> None:
        """The current stream is done with what was taken last: its buffer may be written again."""
        if self._in is not None:
            self._free[self._turn] = torch.cuda.current_stream(self._device).record_event()
            self._turn = 1 - self._turn

    def _fetch(self, features: Tensor, ready: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        assert self._in is not None
        source = features.device
        out = self._out.setdefault(source, torch.cuda.Stream(source))
        buffer, free = self._buffers[self._turn], self._free[self._turn]
        if buffer is None:
            buffer = self._buffers[self._turn] = torch.empty_like(features, device=self._device)
            self._in.wait_stream(torch.cuda.current_stream(self._device))  # its memory may have had a user
        if free is not None:
            self._in.wait_event(free)
        out.wait_event(ready)
        # torch copies between GPUs on the current streams of both and makes each wait for the other
        with torch.cuda.stream(out), torch.cuda.stream(self._in):
            buffer.copy_(features, non_blocking=True)
            arrived = self._in.record_event()
        features.record_stream(out)
        return buffer, arrived
