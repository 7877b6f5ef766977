"""AdamW on fp32 master weights, the clip, and the learning rate as a pure function of the step.

torch's fused AdamW is used because the default and foreach ones read `torch.compiler.is_compiling()`, which
is global on torch >= 2.13: while any thread compiles, the other replicas would round differently (2.4e-7) and
drift apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.drafter import Drafter
from trainer.products import Storage

BETA1 = 0.9
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear warm-up over `warmup_share` of the steps, then a cosine to zero; `step` counts from 0."""
    warmup = round(train.warmup_share * train.steps)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    done = (step - warmup) / max(train.steps - warmup, 1)
    return train.lr * 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizer:
    """One replica's optimizer. Replicas that are given the same gradients stay bit-identical."""

    def __init__(self, drafter: Drafter, storage: Storage, train: TrainConfig) -> None:
        self._train, self._storage = train, storage
        self._named = dict(drafter.named_parameters())
        matrices = [p for p in self._named.values() if p.dim() == 2]
        norms = [p for p in self._named.values() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=train.lr, betas=(BETA1, train.beta2), fused=True)

    def step(self, step: int, denominator: Tensor | float) -> tuple[float, Tensor]:
        """Divide the summed gradients by `denominator`, clip, update, zero them; returns (learning rate,
        norm before the clip as a 0-d tensor). Nothing waits for the device."""
        gradients = self._storage.gradients
        denominator = torch.as_tensor(denominator, device=gradients.device).float().clamp(min=1e-9)
        norm = torch.linalg.vector_norm(gradients) / denominator
        # The fused kernel divides each gradient by this while it reads it, as for torch's gradient scaler.
        self._adamw.grad_scale = denominator * (norm / self._train.clip).clamp(min=1.0)
        lr = learning_rate(self._train, step)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        gradients.zero_()
        self._storage.refresh()
        return lr, norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Both moments of every parameter, named `exp_avg.<parameter>`; empty before the first step."""
        state = self._adamw.state
        return {f"{m}.{name}": state[p][m] for m in MOMENTS for name, p in self._named.items() if p in state}

    def load(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Take over moments saved after `step` steps; the weights were loaded before. Raises KeyError for a
        missing moment, RuntimeError for one of another shape, which the fused kernel would read beyond."""
        for name, parameter in self._named.items():
            state = {m: tensors[f"{m}.{name}"].to(parameter.device, torch.float32) for m in MOMENTS}
            if odd := [m for m in MOMENTS if state[m].shape != parameter.shape]:
                raise RuntimeError(f"{odd[0]}.{name} is of shape {list(state[odd[0]].shape)}")
            # torch keeps the count on the parameter's device when fused
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                **state,
            }
        self._storage.refresh()
