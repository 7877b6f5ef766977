"""Is the engine as right as transformers? Judged layer by layer in fp32, then over the whole depth."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common import say, table
from trainer import target_layers, target_modules
from trainer.packed_ops import REFERENCE, Operators
from trainer.packing import Layout
from trainer.target import deviations
from trainer.target_islands import EAGER
from trainer.target_layers import RowState, read_layer


@torch.no_grad()
def by_layer(
    decoder: nn.Module, config: Any, lengths: list[int], dtype: torch.dtype, kernels: Operators
) -> None:
    """Print, for one layer of each kind, how far the engine and transformers' module, both in `dtype`, are
    from the exact update (output less input): engine and references in fp32, which tests hold equal to
    transformers on a CPU. Packed documents of `lengths` for the engine, each alone for transformers."""
    device = decoder.embed_tokens.weight.device
    layout = Layout.of(lengths, device)
    hidden = torch.randn(sum(lengths), config.hidden_size, device=device, dtype=dtype)
    rows = []
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    for kind in dict.fromkeys(kinds):
        layer = decoder.layers[kinds.index(kind)]
        exact = _engine(copy.deepcopy(layer).float(), decoder, config, hidden.float(), layout, REFERENCE)
        ours = _engine(layer, decoder, config, hidden, layout, kernels)
        theirs = torch.cat(
            [
                _module(layer, decoder, part, Layout.of([len(part)], device), kernels)
                for part in hidden.split(lengths)
            ]
        )
        rows.append((kind, *(f"{_error(found, hidden, exact):.2e}" for found in (ours, theirs))))
    say("error of one layer's update against fp32")
    table(("layer", f"engine, {dtype}, packed", f"transformers, {dtype}, alone"), rows)


def _engine(
    layer: nn.Module, decoder: nn.Module, config: Any, hidden: Tensor, layout: Layout, operators: Operators
) -> Tensor:
    outputs: list[Tensor] = []
    cos, sin = _rotation(decoder, hidden, layout)
    state = RowState(layout, cos, sin, EAGER, operators.attention, operators.recurrence)
    target_layers.run([read_layer(layer, config)], hidden.clone(), state, lambda index, x: outputs.append(x))
    return outputs[0]


def _module(
    layer: nn.Module, decoder: nn.Module, hidden: Tensor, layout: Layout, operators: Operators
) -> Tensor:
    rotation = tuple(t[None] for t in _rotation(decoder, hidden, layout))
    with target_modules.running(layout, operators.attention):
        output = layer(hidden[None], position_embeddings=rotation, attention_mask=None)
    return output[0] if isinstance(output, Tensor) else output[0][0]


def _rotation(decoder: nn.Module, hidden: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    cos, sin = decoder.rotary_emb(hidden, layout.positions.expand(3, 1, -1))
    return cos[0], sin[0]


def _error(found: Tensor, hidden: Tensor, exact: Tensor) -> float:
    wanted = exact - hidden.float()
    return float((found.float() - exact).norm() / wanted.norm())


def print_agreement(title: str, found: Tensor, wanted: Tensor, layer_ids: tuple[int, ...]) -> None:
    """Per tap of [n, K*H]: cosine of a token's feature (mean, worst), deviation (whole, worst token's)."""
    taps = len(layer_ids)
    shares = deviations(found, wanted, taps)
    rows = []
    for tap, (mine, theirs) in enumerate(zip(found.chunk(taps, -1), wanted.chunk(taps, -1), strict=True)):
        mine, theirs = mine.float(), theirs.float()
        cosine = F.cosine_similarity(mine, theirs, dim=-1)
        whole = float((mine - theirs).norm() / theirs.norm())
        rows.append(
            (f"layer {layer_ids[tap]}", f"{cosine.mean():.6f}", f"{cosine.min():.6f}", f"{whole:.1e}",
             f"{shares[tap]:.1e}")
        )  # fmt: skip
    say(title)
    table(("tap", "cosine", "worst token", "deviation", "worst token"), rows)
