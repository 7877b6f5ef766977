"""Several trainer processes on one machine, started by torchrun, take one training's steps together.

Each has its own targets and drafters; process 0 leads: it alone writes checkpoints, evaluates and exports.
Without torchrun there is one process and none of this costs anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

PATIENCE = timedelta(minutes=30)  # the others wait that long while process 0 evaluates or saves


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
            torch.distributed.all_reduce(tensor, group=self.devices)

    def spread(self, checksum: Tensor) -> Tensor:
        """0-d int64 of each process -> [largest, smallest] of all, or [checksum] of the only one."""
        if self.size == 1:
            return checksum[None]
        both = torch.stack([checksum, -checksum])
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=self.devices)
        return torch.stack([both[0], -both[1]])

    def any(self, mine: bool) -> bool:
        """Whether any process says so; the hosts meet for it, the devices go on."""
        if self.size == 1:
            return mine
        votes = torch.tensor([int(mine)])
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=self.hosts)
        return bool(votes.item())

    def close(self) -> None:
        """Leave the others, before Python shuts down. A group joins its threads only when its last reference
        goes; one that frees a tensor while the interpreter ends took the process along (SIGABRT, in up to
        8 of 8 exits with gloo on torch 2.13)."""
        if self.size > 1:
            torch.distributed.destroy_process_group()
            self.hosts = self.devices = None


ALONE = World()


def join(rank: int, size: int, device: torch.device) -> World:
    """Meet the other processes; `device` is this process's first drafter's."""
    if size == 1:
        return ALONE
    torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    hosts = torch.distributed.group.WORLD
    if device.type != "cuda":
        return World(rank, size, hosts, hosts)
    torch.cuda.set_device(device)
    devices = torch.distributed.new_group(backend="nccl", timeout=PATIENCE)
    return World(rank, size, hosts, devices)
