"""The two islands that a compiler makes slowly, by hand: what a head needs is read once, in one kernel.

inductor's versions of them move 1.2 TB/s on an H200, a third of what its memory gives. The eager islands
stay the truth that `Target.warm_up` holds these against.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32  # a program's, of one head


@triton.jit
def _convolution_kernel(
    x,
    weight,
    positions,
    out,
    T,
    row_stride,
    channels,
    first,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    TAPS: tl.constexpr,
    UNIT: tl.constexpr,
    BT: tl.constexpr,
):
    """out[t, head] = SiLU(causal convolution of x[:, first + head's channels]), of norm 1 if UNIT."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    column = tl.arange(0, WIDE)
    channel = first + head * SIZE + column
    whole = (t < T)[:, None] & (column < SIZE)[None, :]
    place = tl.load(positions + t, mask=t < T, other=0)
    row = t.to(tl.int64)
    total = tl.zeros((BT, WIDE), dtype=tl.float32)
    for back in tl.static_range(TAPS):
        inside = whole & (place >= back)[:, None]
        value = tl.load(x + (row - back)[:, None] * row_stride + channel[None, :], mask=inside, other=0.0)
        tap = tl.load(weight + (TAPS - 1 - back) * channels + channel, mask=column < SIZE, other=0.0)
        total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
    total = total * tl.sigmoid(total)
    if UNIT:
        total = total * tl.rsqrt(tl.sum(total * total, axis=1) + 1e-6)[:, None]
    places = row[:, None] * (heads * SIZE) + head * SIZE + column[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=whole)


def convolved_heads(
    projected: Tensor, weight: Tensor, positions: Tensor, first: int, heads: int, size: int, *, unit: bool
) -> Tensor:
    """[T, heads, size] of the channels from `first` on; weight [channels, taps], stored tap by tap."""
    length, taps = projected.shape[0], weight.shape[1]
    out = projected.new_empty(length, heads, size)
    _convolution_kernel[(heads, triton.cdiv(length, TOKENS))](
        projected, weight, positions, out, length, projected.stride(0), weight.stride(1), first,
        SIZE=size, WIDE=triton.next_power_of_2(size), TAPS=taps, UNIT=unit, BT=TOKENS,
    )  # fmt: skip
    return out


@triton.jit
def _rotation_kernel(
    x,
    cos,
    sin,
    weight,
    out,
    T,
    row_stride,
    eps,
    HEAD_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    BT: tl.constexpr,
):
    """out[t, head] = rotated RMS norm of x[t, head]; the first 2 HALF of SIZE dimensions turn in pairs."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    row, column = t.to(tl.int64), tl.arange(0, WIDE)
    whole = (t < T)[:, None] & (column < SIZE)[None, :]
    turning = whole & (column < 2 * HALF)[None, :]
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    start = x + row[:, None] * row_stride + head * HEAD_STRIDE
    own = tl.load(start + column[None, :], mask=whole, other=0.0).to(tl.float32)
    other = tl.load(start + partner[None, :], mask=turning, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / SIZE + eps)[:, None]
        mine = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
        theirs = tl.load(weight + partner, mask=column < 2 * HALF, other=0.0).to(tl.float32)
        if CENTRED:
            mine += 1.0
            theirs += 1.0
        own = own * scale * mine[None, :]
        other = other * scale * theirs[None, :]
    places = row[:, None] * (2 * HALF) + column[None, :]
    c = tl.load(cos + places, mask=turning, other=1.0).to(tl.float32)
    s = tl.load(sin + places, mask=turning, other=0.0).to(tl.float32)
    turned = own * c + tl.where(column < HALF, -1.0, 1.0)[None, :] * other * s
    targets = row[:, None] * (heads * SIZE) + head * SIZE + column[None, :]
    tl.store(out + targets, turned.to(out.dtype.element_ty), mask=whole)


def rotated_heads(
    heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, centred: bool
) -> Tensor:
    """[T, heads, D] contiguous, of a strided [T, heads, D]; cos, sin [T, R]."""
    length, count, size = heads.shape
    out = heads.new_empty(length, count, size)
    _rotation_kernel[(count, triton.cdiv(length, TOKENS))](
        heads, cos.contiguous(), sin.contiguous(), cos if weight is None else weight, out,
        length, heads.stride(0), eps,
        HEAD_STRIDE=heads.stride(1), SIZE=size, WIDE=triton.next_power_of_2(size), HALF=cos.shape[1] // 2,
        NORMED=weight is not None, CENTRED=centred, BT=TOKENS,
    )  # fmt: skip
    return out
