"""The element-wise islands between matrix products: plain functions, compiled once each where that pays.

Whole layers take minutes to compile and win nothing over these (measured on an H200: > 100 s a model, no
gain). All layers share one graph an island, because shapes, strides and types are the same in each.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import Refusal
from trainer.masks import FlexMask, Mask
from trainer.own_code import compile_own


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised over the last dimension in fp32 whatever the compute type, as Qwen3 does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


def add_rms_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + change, its norm): the residual stream goes through memory once, not twice."""
    x = x + change
    return x, rms_norm(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, d], cos and sin [n, d]; halves convention."""
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


def queries(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, heads, d], normalised per head and rotated."""
    return rotate(rms_norm(x, weight, eps), cos, sin)


def keys_values(
    context: Tensor,
    block: Tensor,
    weight: Tensor,
    eps: float,
    context_rotary: tuple[Tensor, Tensor],
    block_rotary: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """context [T, 2, kv heads, d] and block [Q, 2, kv heads, d], keys first -> keys and values
    [T+Q, kv heads, d]."""
    key = torch.cat(
        [
            queries(context[:, 0], weight, eps, *context_rotary),
            queries(block[:, 0], weight, eps, *block_rotary),
        ]
    )
    return key, torch.cat([context[:, 1], block[:, 1]])


def swiglu(gate_up: Tensor) -> Tensor:
    """[n, 2 I], gates first -> [n, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Dense attention: [Q, heads, d] over [S+Q, kv heads, d] -> [Q, heads, d]."""
    if isinstance(mask, FlexMask):
        raise TypeError("flex masks need compiled attention: set drafter.islands = islands.compiled(device)")
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.visible, enable_gqa=True)
    return out[0].transpose(0, 1)


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] -> (loss fp32 [n], whether the label won bool [n], d(sum of weights x loss)/d logits [n,
    V]).

    Reductions and one pointwise expression over the logits and nothing in between, so that compiled it reads
    them three times and writes the gradient once.
    """
    wide = logits.float()
    log_total = wide.logsumexp(-1)
    loss = log_total - wide.gather(1, labels[:, None])[:, 0]
    won = wide.argmax(-1) == labels
    label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    gradient = ((wide - log_total[:, None]).exp() - label.float()) * weights[:, None]
    return loss, won, gradient.to(logits.dtype)


@dataclass(frozen=True)
class Islands:
    """One drafter's set; the defaults run eagerly at any shape."""

    rms_norm: Callable[..., Tensor] = rms_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = add_rms_norm
    queries: Callable[..., Tensor] = queries
    keys_values: Callable[..., tuple[Tensor, Tensor]] = keys_values
    swiglu: Callable[[Tensor], Tensor] = swiglu
    attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor] = attend
    cross_entropy: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = cross_entropy


EAGER = Islands()

# Graphs of a drafter's training step: each island once, and two of them twice: a norm of the context
# and one of the frozen embeddings, a sum with these and one with a stream that carries gradients.
GRAPHS_PER_DRAFTER = 9


def compiled(device: torch.device) -> Islands:
    """A set for one drafter alone (own_code.py). Fixed shapes only, so one graph each. On CPU just the loss,
    whose passes over the vocabulary are the hot ones."""
    return Islands(cross_entropy=compile_own(cross_entropy)) if device.type == "cpu" else all_compiled()


def all_compiled(backend: str = "inductor") -> Islands:
    """Every island compiled, attention by flex."""
    from torch.nn.attention.flex_attention import flex_attention

    once = functools.partial(compile_own, backend=backend)
    flex = once(flex_attention)

    def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        if not isinstance(mask, FlexMask):
            raise TypeError("compiled attention takes flex masks; dense ones are for the eager islands")
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        return flex(query, key, value, block_mask=mask.blocks, enable_gqa=True)[0].transpose(0, 1)

    return Islands(
        rms_norm=once(rms_norm),
        add_rms_norm=once(add_rms_norm),
        queries=once(queries),
        keys_values=once(keys_values),
        swiglu=once(swiglu),
        attend=attend_flex,
        cross_entropy=once(cross_entropy),
    )


def cpu_compiler() -> str | None:
    """The C++ compiler that CPU islands need, or None."""
    return next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


def decide(wish: str, device: torch.device) -> tuple[bool, str]:
    """Whether to compile, and the remark if not."""
    if wish == "off" and device.type == "cuda":
        raise Refusal("compile: off is for the CPU: on a GPU the drafter's attention exists only compiled")
    if wish == "off":
        return False, "compile: off, everything runs eagerly"
    if device.type == "cpu" and cpu_compiler() is None:
        if wish == "on":
            raise Refusal("compile: on needs a C++ compiler: install g++, or set compile: auto")
        return False, "no C++ compiler here: everything runs eagerly (install g++ to compile the loss)"
    return True, ""
