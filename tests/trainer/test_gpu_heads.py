"""The hand-written kernels compute what the eager islands do, at shapes that no tile divides."""

from __future__ import annotations

import pytest
import torch

from trainer import target_islands
from trainer.packing import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (40, 1, 34, 130)


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(
        *shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(sum(shape))
    )


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (32, 24)])
def test_convolution_with_norm_per_head(dtype, allowed, key_dim, value_dim):
    positions = Layout.of(LENGTHS, torch.device("cuda")).positions
    channels = 2 * 2 * key_dim + 6 * value_dim
    convolution = drawn(4, channels, dtype=dtype).t()
    projected = drawn(sum(LENGTHS), channels + 6 * value_dim + 12, dtype=dtype)
    gates = drawn(6, dtype=torch.float32), drawn(6, dtype=torch.float32)
    arguments = (projected, convolution, positions, *gates, 2, key_dim, 6, value_dim)
    found = target_islands.fused().delta_inputs(*arguments)
    for mine, theirs in zip(found, target_islands.delta_inputs(*arguments), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert target_islands.apart(mine.float(), theirs.float()) < allowed


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("gated", "size", "rotated"), [(True, 256, 64), (False, 128, 128), (False, 24, 24)])
@pytest.mark.parametrize("norm", ["centred", "plain", None])
def test_norm_and_rotation_per_head(dtype, allowed, gated, size, rotated, norm):
    projected = drawn(sum(LENGTHS), 4 * size * (1 + gated) + 2 * 2 * size, dtype=dtype)
    cos, sin = (drawn(sum(LENGTHS), rotated, dtype=dtype) for _ in range(2))
    weight = None if norm is None else drawn(size, dtype=dtype)
    arguments = (projected, cos, sin, weight, weight, 1e-6, norm == "centred", 4, 2, size, gated)
    found = target_islands.fused().attention_inputs(*arguments)
    for mine, theirs in zip(found, target_islands.attention_inputs(*arguments), strict=True):
        assert mine.shape == theirs.shape and mine.is_contiguous()
        assert target_islands.apart(mine.float(), theirs.float()) < allowed
