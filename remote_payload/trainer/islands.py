"""The element-wise islands between matrix products: plain functions, compiled once each where that pays.

Whole layers take minutes to compile and win nothing over these (measured on an H200: > 100 s a model, no
gain).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.masks import FlexMask, Mask


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised in fp32 whatever the compute type, as Qwen3 does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Dense attention: [heads, Q, d] over [kv heads, S+Q, d] -> [heads, Q, d]."""
    if isinstance(mask, FlexMask):
        raise TypeError("flex masks need compiled attention: set drafter.islands = islands.compiled(device)")
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask.visible, enable_gqa=True
    )[0]


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] -> (loss fp32 [n], whether the label won bool [n], d(sum of weights x loss)/d logits [n,
    V])."""
    log_share = torch.log_softmax(logits.float(), -1)
    won = log_share.argmax(-1) == labels
    loss = -log_share.gather(1, labels[:, None])[:, 0]
    gradient = log_share.exp_().mul_(weights[:, None])
    gradient.scatter_add_(1, labels[:, None], -weights[:, None])
    return loss, won, gradient.to(logits.dtype)


@dataclass(frozen=True)
class Islands:
    """One drafter's set; the defaults run eagerly at any shape."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor] = attend
    cross_entropy: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = cross_entropy


EAGER = Islands()


def compiled(device: torch.device) -> Islands:
    """Fixed shapes only, so one graph each. On CPU just the loss, whose passes over the vocabulary are the
    hot ones."""
    loss = torch.compile(cross_entropy, dynamic=False, fullgraph=True)
    if device.type == "cpu":
        return Islands(cross_entropy=loss)
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        if not isinstance(mask, FlexMask):
            raise TypeError("dense masks are for the CPU")
        return flex(query[None], key[None], value[None], block_mask=mask.blocks, enable_gqa=True)[0]

    return Islands(
        rms_norm=torch.compile(rms_norm, dynamic=False, fullgraph=True),
        swiglu=torch.compile(swiglu, dynamic=False, fullgraph=True),
        attend=attend_flex,
        cross_entropy=loss,
    )


def cpu_compiler() -> str | None:
    """The C++ compiler that CPU islands need, or None."""
    return next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
