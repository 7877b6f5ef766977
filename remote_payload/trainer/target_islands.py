"""The element-wise work between the target's matrix products, fused: where an eager forward loses a quarter.

Plain functions over whole rows, [T, …], compiled once each at the row's fixed shape and shared by every layer
of a target; the same functions run eagerly at any other shape. Compiling a layer whole gains nothing and
takes minutes (measured on an H200: more than 100 s for 64 layers).

`eight_bit` makes an island end in the scaled 8-bit form that the next product wants.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer import fp8
from trainer.errors import Refusal
from trainer.own_code import compile_own

Activation = Tensor | fp8.Scaled


def add_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, centred: bool, eight_bit: bool
) -> tuple[Tensor, Activation]:
    """(hidden + delta, its RMS norm): the residual sum costs no pass of its own."""
    total = hidden + delta
    return total, _ready(_normed(total, weight, eps, centred), eight_bit)


def norm(hidden: Tensor, weight: Tensor, eps: float, centred: bool, eight_bit: bool) -> Activation:
    return _ready(_normed(hidden, weight, eps, centred), eight_bit)


def attention_inputs(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    centred: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    """Query [T, heads, D] and key [T, kv heads, D], normalised and rotated.

    projected [T, …] holds queries (each followed by its gate if `gated`), then keys, then values; cos, sin
    [T, R] rotate the first R of the D dimensions.
    """
    query, key = attention_heads(projected, heads, kv_heads, head_dim, gated)
    if q_norm is not None and k_norm is not None:
        query, key = _normed(query, q_norm, eps, centred), _normed(key, k_norm, eps, centred)
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def attention_heads(
    projected: Tensor, heads: int, kv_heads: int, head_dim: int, gated: bool
) -> tuple[Tensor, Tensor]:
    """Views [T, heads, D] and [T, kv heads, D] of the columns that hold query and key."""
    width = head_dim * (2 if gated else 1)
    query = projected[:, : heads * width].unflatten(1, (heads, width))[..., :head_dim]
    key = projected[:, heads * width :][:, : kv_heads * head_dim].unflatten(1, (kv_heads, head_dim))
    return query, key


def gate_output(seen: Tensor, projected: Tensor, gated: bool, eight_bit: bool) -> Activation:
    """Attention's output [T, heads, D] times the sigmoid of the gates in `projected` -> [T, heads x D]."""
    if gated:
        heads, head_dim = seen.shape[1:]
        gate = projected[:, : 2 * heads * head_dim].unflatten(1, (heads, 2 * head_dim))[..., head_dim:]
        seen = seen * torch.sigmoid(gate)
    return _ready(seen.flatten(1), eight_bit)


def delta_inputs(
    projected: Tensor,
    convolution: Tensor,
    positions: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the gated delta rule takes: query and key [T, key heads, D] of norm 1, value [T, value heads, E],
    log decay fp32 and beta [T, value heads].

    projected [T, …] holds query, key, value, the output gate z, b, a. The causal convolution, [channels,
    taps], starts anew where `positions` does, so no kernel has to be told the borders; its SiLU, the split
    and the normalisation cost no pass of their own.
    """
    keys = key_heads * key_dim
    query, key, value = (
        causal_convolution(
            projected[:, first : first + heads * size].unflatten(1, (heads, size)),
            convolution[first : first + heads * size].unflatten(0, (heads, size)),
            positions,
        )
        for first, heads, size in (
            (0, key_heads, key_dim),
            (keys, key_heads, key_dim),
            (2 * keys, value_heads, value_dim),
        )
    )
    return _unit(query), _unit(key), value, *delta_gates(projected, a_log, dt_bias, value_heads)


def delta_gates(projected: Tensor, a_log: Tensor, dt_bias: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """Log decay fp32 and beta, [T, value heads], of the last columns, b then a."""
    b, a = projected[:, -2 * value_heads :].split(value_heads, dim=1)
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()


def delta_output(
    read: Tensor, projected: Tensor, weight: Tensor, eps: float, first: int, eight_bit: bool
) -> Activation:
    """The delta rule's output [T, value heads, E], normalised per head, times SiLU of the gate z that begins
    at column `first` of `projected` -> [T, value heads x E]."""
    gate = projected[:, first : first + read[0].numel()].unflatten(1, read.shape[1:])
    normed = _normed(read, weight, eps, centred=False)
    return _ready((normed * F.silu(gate.float())).to(read.dtype).flatten(1), eight_bit)


def swiglu(projected: Tensor, eight_bit: bool) -> Activation:
    """[T, 2 I], gate then up -> [T, I]."""
    gate, up = projected.chunk(2, dim=1)
    return _ready(F.silu(gate) * up, eight_bit)


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Depthwise, then SiLU: x [T, …channels], weight [channels…, taps] -> [T, …channels]. A tap that would
    reach into the document before, where `positions` int64 [T] restarts, counts as zero.

    Channels keep their heads' shape, so that what follows per head can be computed in the same kernel.
    """
    channels, taps = (1,) * (x.dim() - 1), weight.shape[-1]
    total = x.float() * weight[..., -1].float()
    for back in range(1, taps):
        earlier = F.pad(x, (0, 0) * len(channels) + (back, 0))[: x.shape[0]]
        inside = (positions >= back).unflatten(0, (-1, *channels))
        total = total + torch.where(inside, earlier.float() * weight[..., taps - 1 - back].float(), 0.0)
    return F.silu(total).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """RMS norm over the last dim in fp32. `centred` weights are stored less one and applied before rounding
    (Gemma, Qwen3.5); others after it (Llama)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype) if centred else weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turning.chunk(2, dim=-1)
    turned = turning * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]
    return torch.cat([turned, still], dim=-1)


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _ready(x: Tensor, eight_bit: bool) -> Activation:
    return fp8.scaled(x) if eight_bit else x


@dataclass(frozen=True)
class Islands:
    """One set: eager, or compiled."""

    add_norm: Callable[..., tuple[Tensor, Activation]] = add_norm
    norm: Callable[..., Activation] = norm
    attention_inputs: Callable[..., tuple[Tensor, Tensor]] = attention_inputs
    gate_output: Callable[..., Activation] = gate_output
    delta_inputs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = delta_inputs
    delta_output: Callable[..., Activation] = delta_output
    swiglu: Callable[..., Activation] = swiglu


EAGER = Islands()


def compiled(backend: str = "inductor") -> Islands:
    """A set for one Target, with code objects of its own (own_code.py); weights are arguments, so all layers
    share it. Several threads may, too: at one shape each code object has one entry, which none can lose."""
    return Islands(
        **{field.name: compile_own(getattr(EAGER, field.name), backend) for field in fields(Islands)}
    )


def fused() -> Islands:
    """`compiled`, and what `gpu.heads` does better; for a Target on a CUDA device."""
    from trainer.gpu import heads as kernels

    gates = compile_own(delta_gates)

    def delta_inputs(
        projected: Tensor, convolution: Tensor, positions: Tensor, a_log: Tensor, dt_bias: Tensor,
        key_heads: int, key_dim: int, value_heads: int, value_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        convolved = functools.partial(kernels.convolved_heads, projected, convolution, positions)
        keys = key_heads * key_dim
        return (
            convolved(0, key_heads, key_dim, unit=True),
            convolved(keys, key_heads, key_dim, unit=True),
            convolved(2 * keys, value_heads, value_dim, unit=False),
            *gates(projected, a_log, dt_bias, value_heads),
        )

    def attention_inputs(
        projected: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
        eps: float, centred: bool, heads: int, kv_heads: int, head_dim: int, gated: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        query, key = attention_heads(projected, heads, kv_heads, head_dim, gated)
        return (
            kernels.rotated_heads(query, cos, sin, q_norm, eps, centred),
            kernels.rotated_heads(key, cos, sin, k_norm, eps, centred),
        )

    return replace(compiled(), delta_inputs=delta_inputs, attention_inputs=attention_inputs)


PROVEN_CALLS = 2  # of each island: 27B layers repeat, and an eager call at full size takes 20 ms
PROVEN_TO = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of a row; a step of bf16 is up to 0.8 %
EIGHT_BIT_PROVEN_TO = 6e-2  # one value in sixteen rounds to the other neighbour, a step of up to 12 %


def proven(islands: Islands) -> Islands:
    """The same islands, which hold their first calls against the eager ones: output by output, row by row,
    so that neither depth nor rare rows hide a difference. Raises Refusal with the island's name."""
    return Islands(
        **{field.name: _proven(field.name, getattr(islands, field.name)) for field in fields(Islands)}
    )


def _proven(name: str, island: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count()

    def held_against_eager(*arguments: Any) -> Any:
        found = island(*arguments)
        if next(calls) < PROVEN_CALLS:
            wanted = getattr(EAGER, name)(*arguments)
            for mine, theirs in zip(_parts(found), _parts(wanted), strict=True):
                worst, allowed = _compared(mine, theirs)
                if not worst <= allowed:
                    raise Refusal(
                        f"the compiled island {name} deviates from the eager one by {worst:.1e} of a row "
                        f"(allowed {allowed:.0e}): start with --fresh-cache, or set compile: off"
                    )
        return found

    return held_against_eager


def _parts(output: Any) -> tuple[Activation, ...]:
    return (output,) if isinstance(output, Activation) else output


def _compared(found: Activation, wanted: Activation) -> tuple[float, float]:
    """How far they are apart, and how far they may be."""
    if isinstance(found, fp8.Scaled) and isinstance(wanted, fp8.Scaled):
        return apart(fp8.unscaled(found), fp8.unscaled(wanted)), EIGHT_BIT_PROVEN_TO
    return apart(found, wanted), PROVEN_TO[wanted.dtype]


def apart(found: Tensor, wanted: Tensor) -> float:
    """The worst row's |found - wanted| / |wanted|, rows along the first dim. Relative to the row: a few
    features of a real model are thousands of times the rest and would hide everything."""
    found, wanted = found.flatten(1), wanted.flatten(1)
    size = torch.linalg.vector_norm(wanted, dim=1, dtype=torch.float32)
    difference = torch.linalg.vector_norm(found - wanted, dim=1, dtype=torch.float32)
    return float((difference / size.clamp(min=torch.finfo(torch.float32).tiny)).max())
