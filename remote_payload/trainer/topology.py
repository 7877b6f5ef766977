"""Which device each target and each drafter runs on; the same device may be named more than once.

`split: auto` gives every GPU one role and chooses the split with the most rows a second, reckoned from the
arithmetic of both sides (work.py) at the share of a GPU's matrix rate that each reaches. One GPU carries both
roles, and so does the CPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from trainer.balance import Costs, best_split
from trainer.config import Recipe
from trainer.errors import Refusal
from trainer.geometry import DrafterGeometry, target_text_config
from trainer.work import rows_ratio

# Shares of the matrix rate that the two sides reach on an H200; the run's own times replace them in the
# advice of `status`.
TARGET_EFFICIENCY, DRAFTER_EFFICIENCY = 0.76, 0.67
_DEVICE = re.compile(r"(cpu|cuda)(?::([0-9]{1,3}))?")


@dataclass(frozen=True)
class Devices:
    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    dtype: torch.dtype  # of the target's weights and of the drafter's products; its master weights are fp32

    @property
    def split(self) -> tuple[int, int]:
        return len(self.targets), len(self.drafters)

    @property
    def apart(self) -> bool:
        """Whether every thread has a GPU of its own."""
        everyone = self.targets + self.drafters
        return everyone[0].type == "cuda" and len(set(everyone)) == len(everyone)

    def __str__(self) -> str:
        def names(devices: tuple[torch.device, ...]) -> str:
            return " ".join(map(str, devices))

        targets, drafters = self.split
        return f"{targets}:{drafters} (targets {names(self.targets)}; drafters {names(self.drafters)})"


def place(recipe: Recipe, geometry: DrafterGeometry, process: int = 0, processes: int = 1) -> Devices:
    """Named devices as they stand; otherwise GPUs in turn, otherwise the CPU. bf16 where it is fast, else
    fp32. Of several processes on one machine each takes its own run of devices."""
    topology = recipe.topology
    gpus = torch.cuda.device_count()
    targets, drafters = topology.named or auto_split(recipe, geometry, gpus // processes)
    wanted = targets + drafters
    names = list(topology.devices or ())
    if not names:
        share = max(1, gpus // processes)
        turns = [each * share + i % share for each in range(processes) for i in range(wanted)]
        names = [f"cuda:{turn % gpus}" if gpus else "cpu" for turn in turns]
    if len(names) != wanted * processes:
        raise Refusal(
            f"topology.devices names {len(names)} devices, {processes} process(es) of {targets}:{drafters} "
            f"need {wanted * processes}: name the targets' first, then the drafters', process by process"
        )
    everyone = [_device(name, gpus) for name in names]
    kinds = {device.type for device in everyone}
    if len(kinds) > 1:
        raise Refusal(f"topology.devices {names}: name only cpu or only cuda devices")
    leaders = everyone[targets::wanted]  # between processes NCCL joins these
    if kinds == {"cuda"} and len(set(leaders)) < processes:
        raise Refusal(
            f"{processes} processes have their first drafters on {' '.join(map(str, leaders))}, and NCCL "
            "wants a GPU for each: name others in topology.devices, or start fewer processes"
        )
    devices = everyone[process * wanted : (process + 1) * wanted]
    fast_bf16 = kinds == {"cuda"} or _cpu_multiplies_bf16()
    auto = torch.bfloat16 if fast_bf16 else torch.float32
    dtype = auto if recipe.target.dtype == "auto" else getattr(torch, recipe.target.dtype)
    return Devices(tuple(devices[:targets]), tuple(devices[targets:]), dtype)


def _device(name: str, gpus: int) -> torch.device:
    """The same device is the same value however it is written: `cuda` is `cuda:0`, `cpu:0` is `cpu`. Read
    here, because torch takes the number of `cuda:256` modulo 256."""
    parts = _DEVICE.fullmatch(name)
    if parts is None:
        raise Refusal(f"topology.devices: {name!r} is no device: write cpu, or cuda:0 and the like")
    if parts[1] == "cpu":
        return torch.device("cpu")
    number = int(parts[2] or 0)
    if number >= gpus:
        raise Refusal(f"topology.devices: {name} is not here, torch sees {gpus} GPU(s)")
    return torch.device("cuda", number)


def auto_split(recipe: Recipe, geometry: DrafterGeometry, gpus: int) -> tuple[int, int]:
    """(targets, drafters) for `gpus` GPUs of one process; never more drafters than rows in a step."""
    ratio = rows_ratio(recipe, geometry, target_text_config(recipe.target.model))
    costs = Costs(target_row=ratio / TARGET_EFFICIENCY, drafter_row=1.0 / DRAFTER_EFFICIENCY)
    return best_split(costs, gpus, recipe.rows_per_step)


def _cpu_multiplies_bf16() -> bool:
    """With AMX a bf16 product takes a sixth of the fp32 one's time; without, many times more."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # no public name yet
    return bool(probe())
