"""Several trainer processes on one machine, started by torchrun, take one training's steps together.

Each has its own targets and drafters; process 0 leads: it alone writes checkpoints, evaluates and exports.
Without torchrun there is one process and none of this costs anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

PATIENCE = timedelta(minutes=30)  # the others wait that long while process 0 evaluates or saves
ARRIVAL = timedelta(minutes=5)  # they are started together, and meet when Python has imported torch
STOPPED_S = 5.0  # how long who is to stop waits for the others still: together they can agree on it


class OthersGone(Exception):
    """Another process of this training has ended, crashed or was refused; one line for a person."""


class NotMet(Exception):
    """A stop was asked for, and the others do not come."""


@contextmanager
def _with_the_others() -> Iterator[None]:
    """What a group's library says when one of it is no more is four lines of its own source."""
    try:
        yield
    except (torch.distributed.DistBackendError, torch.OutOfMemoryError):
        raise  # of NCCL and of the card itself: that may be this process's own trouble
    except RuntimeError as error:
        said = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        raise OthersGone(
            "another process of this training is gone: its own lines in the log, or torchrun's, tell why "
            f"({said})"
        ) from error


@dataclass
class World:
    """Process `rank` of `size`; `hosts` is the group of the CPUs, `devices` that of the drafters' tensors."""

    rank: int = 0
    size: int = 1
    hosts: Any = None
    devices: Any = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def add(self, tensor: Tensor) -> None:
        """Sum over the processes, in place; on CUDA in the order of the current stream."""
        if self.size > 1:
            with _with_the_others():
                torch.distributed.all_reduce(tensor, group=self.devices)

    def spread(self, checksum: Tensor) -> Tensor:
        """0-d int64 of each process -> [largest, smallest] of all, or [checksum] of the only one."""
        if self.size == 1:
            return checksum[None]
        both = torch.stack([checksum, -checksum])
        with _with_the_others():
            torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=self.devices)
        return torch.stack([both[0], -both[1]])

    def any(self, mine: bool) -> bool:
        """Whether any process says so; the hosts meet for it, the devices go on."""
        if self.size == 1:
            return mine
        votes = torch.tensor([int(mine)])
        with _with_the_others():
            torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=self.hosts)
        return bool(votes.item())

    def close(self) -> None:
        """Leave the others once all are done (process 0 exports last), before Python shuts down. A group
        joins its threads only when its last reference goes; one that frees a tensor while the interpreter
        ends took the process along (SIGABRT, in up to 8 of 8 exits with gloo on torch 2.13)."""
        if self.size > 1:
            self.any(False)
            torch.distributed.destroy_process_group()
            self.hosts = self.devices = None


ALONE = World()


def join(rank: int, size: int, device: torch.device, stop: threading.Event | None = None) -> World:
    """Meet the other processes; `device` is this process's first drafter's. Raises OthersGone, and NotMet
    where `stop` is set and they do not come."""
    if size == 1:
        return ALONE
    _meet(stop or threading.Event())
    with _with_the_others():
        hosts = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    if device.type != "cuda":
        return World(rank, size, hosts, hosts)
    torch.cuda.set_device(device)
    devices = torch.distributed.new_group(backend="nccl", timeout=PATIENCE)
    return World(rank, size, hosts, devices)


def _meet(stop: threading.Event) -> None:
    """In a thread of its own: the wait is one call, and Python hears of a signal only between two of the main
    thread's. torchrun killed, after 30 s, whoever waited for a process that had been refused."""
    failure: list[BaseException] = []

    def meet() -> None:
        try:
            with _with_the_others():
                torch.distributed.init_process_group("gloo", timeout=ARRIVAL)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=meet, name="meeting", daemon=True)
    thread.start()
    asked_at: float | None = None
    while thread.is_alive():
        thread.join(0.1)
        if stop.is_set():
            asked_at = asked_at or time.monotonic()
            if time.monotonic() - asked_at > STOPPED_S:
                raise NotMet
    if failure:
        raise failure[0]
