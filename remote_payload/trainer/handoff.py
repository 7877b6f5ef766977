"""Features go from a target's thread to a drafter's without the host waiting for either device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import Row


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's kernels on a stream of its own, so that two roles on one GPU overlap; nothing on the
    CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


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
        ready.record()
    return Delivery(row, features, ready)


def receive(delivery: Delivery, device: torch.device) -> Tensor:
    """The features on `device`; the streams wait for each other, the host does not."""
    if delivery.ready is not None:
        stream = torch.cuda.current_stream(
            delivery.features.device
        )  # a copy between devices runs on the source's
        stream.wait_event(delivery.ready)
        delivery.features.record_stream(stream)
    return delivery.features.to(device, non_blocking=True)
