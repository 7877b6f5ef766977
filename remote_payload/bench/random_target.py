"""A target of any geometry with random weights, made on the device in seconds: speed needs no download."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.geometry import tap_layer_ids
from trainer.kernels import prove
from trainer.packed_ops import Operators
from trainer.target import SharedHead, Target, build

STD = 0.02  # of every matrix, as these models are initialised


def text_config(folder: Path) -> Any:
    """The language model's part of a model folder's config.json."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()


def small_hybrid() -> Any:
    """Qwen3.5's layers at a width for a CPU: 4 layers, one of them attention."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    )  # fmt: skip


def taps(config: Any, layers: int | None = None) -> tuple[int, ...]:
    """The paper's five tapped layers; five spread over the first `layers` if only those are to run."""
    if layers:
        return tuple(sorted({round(i * (layers - 1) / 4) for i in range(5)}))
    return tap_layer_ids(config.num_hidden_layers, 5)


def random_decoder(config: Any, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """transformers' own modules, cut to `layers`, without final norm; matrices normal, norms as
    initialised."""
    from transformers import AutoModel

    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.dtype = dtype
    with torch.device("meta"):
        decoder = AutoModel.from_config(config, dtype=dtype)
    decoder.norm = nn.Identity()
    decoder.to_empty(device=device)
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)  # its buffers were never real
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            _draw(name, parameter, type(decoder).__name__)
    return decoder


def _draw(name: str, parameter: Tensor, family: str) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(0.01, 16).log_()
    elif name.endswith("dt_bias"):
        parameter.fill_(1.0)
    elif name.endswith("conv1d.weight"):
        parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))  # keeps the size of what it convolves
    elif parameter.dim() > 1:
        parameter.normal_(0, STD)
    elif name.endswith("bias"):
        parameter.zero_()
    else:  # a norm: Qwen3.5 and Gemma store it less one, but for the delta net's gated norm
        centred = family.startswith(("Qwen3_5", "Gemma")) and "linear_attn" not in name
        parameter.fill_(0.0 if centred else 1.0)


def build_random_target(
    folder: Path | str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    layer_ids: tuple[int, ...] | None = None,
    precision: str | None = None,
    layers: int | None = None,
    kernels: Operators | None = None,
) -> tuple[Target, SharedHead]:
    """A Target and its head for a folder that needs no more than config.json. `layers`: only the first so
    many; `layer_ids`: other taps than the paper's; `kernels`: other than those that `prove` chooses."""
    config = text_config(Path(folder))
    layer_ids = layer_ids or taps(config, layers)
    decoder = random_decoder(config, layer_ids[-1] + 1, device, dtype)
    embed = decoder.embed_tokens.weight.detach()
    lm_head = torch.empty_like(embed).normal_(0, STD)
    kernels = kernels or prove(config, device, dtype)
    return build(decoder, layer_ids, device, dtype, kernels, precision=precision), SharedHead(embed, lm_head)
