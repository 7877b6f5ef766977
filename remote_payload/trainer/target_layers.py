"""The lean forward of the target's decoder layers: Hugging Face's weights and results, in fewer passes.

A layer is read once from its module into plain records. Products that share an input become one (query, key
and value; gate and up; the five inputs of a delta net), their weights moved into one tensor of which the
module keeps views; so the module still works, and nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer import fp8
from trainer.packed_ops import Attention, Recurrence
from trainer.packing import Layout
from trainer.target_islands import Activation, Islands


@dataclass(frozen=True)
class Product:
    """y = x W^T + b for W [N, K], or its 8-bit form."""

    weight: Tensor | fp8.Scaled
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def eight_bit(self) -> bool:
        return isinstance(self.weight, fp8.Scaled)

    def __call__(self, x: Activation) -> Tensor:
        if isinstance(self.weight, fp8.Scaled):
            return fp8.product(x, self.weight, self.bias, self.dtype)
        return F.linear(x, self.weight, self.bias)

    def added(self, hidden: Tensor, x: Activation) -> tuple[Tensor, Tensor | None]:
        """(hidden + y, None), summed by the product itself and in place; (hidden, y) where it cannot."""
        if self.eight_bit or self.bias is not None:
            return hidden, self(x)
        return hidden.addmm_(x, self.weight.t()), None


@dataclass(frozen=True)
class Norm:
    """RMS norm; `centred` as in target_islands."""

    weight: Tensor
    eps: float
    centred: bool


@dataclass(frozen=True)
class SoftmaxMixer:
    """Attention; `gated`: each query head comes with a sigmoid gate on its output (Qwen3.5)."""

    inputs: Product
    output: Product
    q_norm: Norm | None
    k_norm: Norm | None
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    scale: float
    window: int | None

    def __call__(self, x: Activation, row: RowState) -> Activation:
        """What `output` reads."""
        projected = self.inputs(x)
        q_norm, k_norm = self.q_norm, self.k_norm
        query, key = row.islands.attention_inputs(
            projected, row.cos, row.sin,
            q_norm and q_norm.weight, k_norm and k_norm.weight,
            q_norm.eps if q_norm else 0.0, q_norm.centred if q_norm else False,
            self.heads, self.kv_heads, self.head_dim, self.gated,
        )  # fmt: skip
        value = projected[:, -self.kv_heads * self.head_dim :].unflatten(1, (self.kv_heads, self.head_dim))
        seen = row.attention(query, key, value, row.layout, self.scale, self.window)
        if not (self.gated or self.output.eight_bit):
            return seen.flatten(1)
        return row.islands.gate_output(seen, projected, self.gated, self.output.eight_bit)


@dataclass(frozen=True)
class DeltaMixer:
    """Gated delta net: causal convolution, recurrence, gated norm."""

    inputs: Product
    output: Product
    convolution: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Norm
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def __call__(self, x: Activation, row: RowState) -> Activation:
        """What `output` reads."""
        projected = self.inputs(x)
        given = row.islands.delta_inputs(
            projected, self.convolution, row.layout.positions, self.a_log, self.dt_bias,
            self.key_heads, self.key_dim, self.value_heads, self.value_dim,
        )  # fmt: skip
        read = row.recurrence(*given, row.layout)
        gate = self.convolution.shape[0]  # the columns after query, key and value
        return row.islands.delta_output(
            read, projected, self.norm.weight, self.norm.eps, gate, self.output.eight_bit
        )


@dataclass(frozen=True)
class Layer:
    mixer: SoftmaxMixer | DeltaMixer
    before_mixer: Norm
    before_mlp: Norm
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class RowState:
    """What one forward hands to every layer: the row, its rotations [T, R], and the functions to use."""

    layout: Layout
    cos: Tensor
    sin: Tensor
    islands: Islands
    attention: Attention
    recurrence: Recurrence | None


def run(layers: Sequence[Layer], hidden: Tensor, row: RowState, tap: Callable[[int, Tensor], None]) -> None:
    """Forward of hidden [T, H], which is overwritten, through `layers`; `tap(i, x)` is shown the output of
    layer i, the whole residual sum, and must copy what it keeps."""
    delta: Tensor | None = None  # what the last product adds to `hidden`; summed where the next norm reads it
    for index, layer in enumerate(layers):
        hidden, normed = _summed(hidden, delta, layer.before_mixer, layer.mixer.inputs, row.islands)
        if index:
            tap(index - 1, hidden)
        hidden, delta = layer.mixer.output.added(hidden, layer.mixer(normed, row))
        hidden, normed = _summed(hidden, delta, layer.before_mlp, layer.gate_up, row.islands)
        delta = layer.down(row.islands.swiglu(layer.gate_up(normed), layer.down.eight_bit))
    tap(len(layers) - 1, hidden if delta is None else hidden + delta)


def _summed(
    hidden: Tensor, delta: Tensor | None, norm: Norm, reader: Product, islands: Islands
) -> tuple[Tensor, Activation]:
    if delta is None:
        return hidden, islands.norm(hidden, norm.weight, norm.eps, norm.centred, reader.eight_bit)
    return islands.add_norm(hidden, delta, norm.weight, norm.eps, norm.centred, reader.eight_bit)


def read_layer(layer: nn.Module, config: Any, *, eight_bit: bool = False) -> Layer:
    """The records of one Hugging Face decoder layer whose class `is_lean` accepts. With `eight_bit` the
    module's products are gone afterwards."""
    centred = hasattr(layer, "linear_attn") or type(layer).__name__.startswith("Qwen3_5")
    mlp = layer.mlp
    return Layer(
        mixer=(
            _delta_mixer(layer.linear_attn, eight_bit)
            if hasattr(layer, "linear_attn")
            else _softmax_mixer(layer.self_attn, config, centred, eight_bit)
        ),
        before_mixer=_norm(layer.input_layernorm, centred),
        before_mlp=_norm(layer.post_attention_layernorm, centred),
        gate_up=_product([mlp.gate_proj, mlp.up_proj], eight_bit),
        down=_product([mlp.down_proj], eight_bit),
    )


# Decoder layers whose forward is the one above, by class; anything else runs through its own module.
_LEAN = ("Qwen3_5", "Qwen3", "Qwen2", "Llama", "Mistral")


def is_lean(decoder: nn.Module, config: Any) -> bool:
    names = {type(layer).__name__ for layer in decoder.layers}
    return names <= {f"{family}DecoderLayer" for family in _LEAN} and config.hidden_act == "silu"


def is_lean_config(config: Any) -> bool:
    """What `is_lean` will say of the decoder, as far as a text configuration tells before it is built."""
    family = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return family in _LEAN and config.hidden_act == "silu"


def _softmax_mixer(module: nn.Module, config: Any, centred: bool, eight_bit: bool) -> SoftmaxMixer:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    windowed = hasattr(module, "sliding_window") or type(module).__name__.startswith("Mistral")
    return SoftmaxMixer(
        inputs=_product([module.q_proj, module.k_proj, module.v_proj], eight_bit),
        output=_product([module.o_proj], eight_bit),
        q_norm=_norm(module.q_norm, centred) if hasattr(module, "q_norm") else None,
        k_norm=_norm(module.k_norm, centred) if hasattr(module, "k_norm") else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=module.head_dim,
        gated=module.q_proj.out_features == 2 * heads * module.head_dim,
        scale=module.scaling,
        window=getattr(module, "sliding_window", config.sliding_window) if windowed else None,
    )


def _delta_mixer(module: nn.Module, eight_bit: bool) -> DeltaMixer:
    parts = [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
    return DeltaMixer(
        inputs=_product(parts, eight_bit),
        output=_product([module.out_proj], eight_bit),
        # [channels, taps], but stored tap by tap: neighbouring channels are read in one go, 1.6 ms a layer
        convolution=module.conv1d.weight.detach().squeeze(1).t().contiguous().t(),
        a_log=module.A_log.detach(),
        dt_bias=module.dt_bias.detach(),
        norm=_norm(module.norm, centred=False),
        key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        value_heads=module.num_v_heads,
        value_dim=module.head_v_dim,
    )


def _norm(module: nn.Module, centred: bool) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight.detach(), eps, centred)


def _product(modules: list[nn.Linear], eight_bit: bool) -> Product:
    """One product of several that read the same input, in order."""
    weights = [module.weight.detach() for module in modules]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = None
    if any(module.bias is not None for module in modules):
        none = [weight.new_zeros(len(rows)) for rows in weights]
        bias = torch.cat([zero if m.bias is None else m.bias for m, zero in zip(modules, none, strict=True)])
    if eight_bit:
        fp8.require_widths(*weight.shape)
    parts = weight.split([len(rows) for rows in weights])
    for module, rows in zip(modules, parts, strict=True):  # frees what the module had: peak memory stays low
        kept = torch.empty_like(rows, device="meta") if eight_bit else rows
        module.weight = nn.Parameter(kept, requires_grad=False)
    return Product(fp8.scaled(weight) if eight_bit else weight, bias, weight.dtype)
