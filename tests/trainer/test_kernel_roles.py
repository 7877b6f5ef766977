"""What the proof calls is what the target will call: the engine's own kernels, or those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MiniMaxConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from trainer import kernels
from trainer.errors import Refusal
from trainer.kernel_roles import document_convolution, roles
from trainer.kernels import KernelReport, prove, race
from trainer.target_layers import is_lean_config

CPU = torch.device("cpu")
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


def convolution(config):
    return next(role for role in roles(config) if role.name == "convolution")


def test_which_configurations_the_lean_engine_takes() -> None:
    assert is_lean_config(Qwen3_5TextConfig())
    assert is_lean_config(LlamaConfig())
    assert not is_lean_config(LlamaConfig(hidden_act="gelu"))
    assert not is_lean_config(Qwen3_5MoeTextConfig())
    assert not is_lean_config(Qwen3NextConfig())


def test_recurrent_layers_that_are_no_delta_net_are_refused_by_name() -> None:
    config = MiniMaxConfig(num_hidden_layers=4)
    assert "linear_attention" in config.layer_types
    with pytest.raises(Refusal, match=r"^MiniMaxConfig has recurrent layers, whose packing is not known"):
        prove(config, CPU, torch.float32)


def test_a_hybrid_without_layers_of_its_own_here_is_refused_with_the_package_that_packs_it() -> None:
    """transformers' modules keep packed rows apart by causal-conv1d alone; told before weights are read."""
    role = convolution(Qwen3_5MoeTextConfig(**HEADS))
    line, chosen = race(role, CPU, torch.float32, tokens=256, longest=64)
    if not line.why:
        pytest.skip("causal-conv1d is here")
    assert (line.fast, chosen) == (False, None)
    report = KernelReport("cuda:0", (line,), document_convolution)
    with pytest.raises(Refusal, match=r"causal_conv1d is not installed.* Mend: .*causal-conv1d"):
        report.require_fast(allow_slow=False)


@pytest.mark.parametrize("make", [Qwen3_5TextConfig, Qwen3_5MoeTextConfig])
def test_the_sample_is_one_that_the_reference_takes(make) -> None:
    role = convolution(make(**HEADS))
    x, weight, row = kernels._arguments(role, 256, 64, CPU, torch.float32)
    assert x.shape == (256, 2 * 2 * 16 + 4 * 24)
    assert weight.shape == (x.shape[1], 4)
    assert role.reference(x, weight, row).shape == x.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_the_proof_names_the_kernel_that_the_engine_calls(dtype: torch.dtype, monkeypatch) -> None:
    from trainer import target_islands
    from trainer.gpu import heads

    pytest.importorskip("fla")
    calls: list[int] = []
    honest = heads.convolved_heads
    monkeypatch.setattr(heads, "convolved_heads", lambda *a, **k: calls.append(len(a[0])) or honest(*a, **k))
    folder = Path(__file__).resolve().parents[2] / "remote_payload" / "bench" / "configs" / "qwen3.5-27b"
    report = prove(kernels.text_config(str(folder)), torch.device("cuda:0"), dtype, tokens=16_384)
    assert report.line("convolution").fast
    assert 16_384 in calls  # a whole row
    calls.clear()
    x, weight = torch.randn(64, 6 * 16 + 4, device="cuda"), torch.randn(6 * 16, 4, device="cuda")
    target_islands.fused().delta_inputs(
        x, weight.t().contiguous().t(), torch.arange(64, device="cuda"), x[0, :2], x[0, :2], 2, 16, 2, 16
    )
    assert calls == [64] * 3
