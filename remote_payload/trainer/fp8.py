"""Products of the frozen target in 8-bit floats: twice the matrix rate where the device has them.

e4m3 with one scale a row: a token's for activations, an output channel's for weights. Both are frozen maxima,
so nothing is calibrated and packed documents share no scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import Refusal

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
_SMALLEST_SCALE = 1e-12  # a row of zeros stays a row of zeros
_ALIGNMENT = 16  # both widths of a scaled product must be multiples of this


class Scaled(NamedTuple):
    """values x scale: e4m3 [rows, K] and fp32 [rows, 1]."""

    values: Tensor
    scale: Tensor


def scaled(rows: Tensor) -> Scaled:
    """[rows, K] of any float type, each row by its own largest magnitude."""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=_SMALLEST_SCALE)
    return Scaled((wide / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale)


def unscaled(rows: Scaled) -> Tensor:
    """bf16 [rows, K]: what the scaled values stand for."""
    return rows.values.to(torch.bfloat16) * rows.scale.to(torch.bfloat16)


def product(x: Scaled, weight: Scaled, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N] in `dtype`."""
    if x.values.is_cuda:
        return torch._scaled_mm(
            x.values, weight.values.t(), x.scale, weight.scale.t(),
            bias=bias, out_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip
    exact = F.linear(x.values.float(), weight.values.float()) * x.scale * weight.scale.t()
    return (exact if bias is None else exact + bias.float()).to(dtype)


def require(device: torch.device, dtype: torch.dtype) -> None:
    """Raise Refusal where a run with `target.precision: fp8` could not be what it says."""
    if device.type != "cuda":
        raise Refusal("target.precision fp8 needs a CUDA device: leave it out on a CPU")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise Refusal(
            f"target.precision fp8: {torch.cuda.get_device_name(device)} has no 8-bit products "
            f"(compute capability {major}.{minor}, 8.9 is needed): leave it out"
        )
    if dtype != torch.bfloat16:
        raise Refusal(f"target.precision fp8 goes with target.dtype bfloat16, this is {dtype}: set it")


def require_widths(*widths: int) -> None:
    """Raise Refusal for a product that cannot be scaled: some in 8 bits and some not would be two engines."""
    for width in widths:
        if width % _ALIGNMENT:
            raise Refusal(
                f"target.precision fp8: a product of the target is {width} wide, no multiple of "
                f"{_ALIGNMENT}: leave it out"
            )
