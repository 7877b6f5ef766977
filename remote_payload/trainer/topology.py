"""Which device each target and each drafter runs on; the same device may be named more than once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.config import Recipe
from trainer.errors import Refusal


@dataclass(frozen=True)
class Devices:
    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    dtype: torch.dtype  # of the target's weights and of the drafter's products; its master weights are fp32

    def __str__(self) -> str:
        def names(devices: tuple[torch.device, ...]) -> str:
            return " ".join(map(str, devices))

        split = f"{len(self.targets)}:{len(self.drafters)}"
        return f"{split} (targets {names(self.targets)}; drafters {names(self.drafters)})"


def place(recipe: Recipe) -> Devices:
    """Named devices as they stand; otherwise GPUs in turn, otherwise the CPU. bf16 where it is fast, else
    fp32."""
    topology = recipe.topology
    wanted = topology.targets + topology.drafters
    gpus = torch.cuda.device_count()
    names = topology.devices or ([f"cuda:{i % gpus}" for i in range(wanted)] if gpus else ["cpu"] * wanted)
    try:
        devices = [torch.device(name) for name in names]
    except RuntimeError as error:
        raise Refusal(f"topology.devices {list(names)}: {str(error).splitlines()[0]}") from None
    for device in devices:
        if device.type not in ("cpu", "cuda"):
            raise Refusal(f"topology.devices: {device} is neither cpu nor cuda")
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise Refusal(f"topology.devices: {device} is not here, torch sees {gpus} GPU(s)")
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise Refusal(f"topology.devices {list(names)}: name only cpu or only cuda devices")
    fast_bf16 = kinds == {"cuda"} or _cpu_multiplies_bf16()
    auto = torch.bfloat16 if fast_bf16 else torch.float32
    dtype = auto if recipe.target.dtype == "auto" else getattr(torch, recipe.target.dtype)
    return Devices(tuple(devices[: topology.targets]), tuple(devices[topology.targets :]), dtype)


def _cpu_multiplies_bf16() -> bool:
    """With AMX a bf16 product takes a sixth of the fp32 one's time; without, many times more."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # no public name yet
    return bool(probe())
