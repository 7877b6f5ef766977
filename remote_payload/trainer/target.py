"""The frozen language model, run only to its last tapped layer; packed documents must not feel each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer import fp8, target_islands, target_layers, target_modules
from trainer.data import Document, Row, pack
from trainer.errors import Refusal
from trainer.packed_ops import Operators
from trainer.packing import Layout, row_lengths, send
from trainer.target_islands import EAGER, Islands, apart

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a run reads its folder and nothing else

# How far a token's feature may be from its document's alone, as a share of its norm. A leak measures 100 %
# and more at a document's first tokens. What remains is rounding, which random weights amplify layer by
# layer: transformers' own bf16 is up to 17 % (worst token, 62 layers) from ours, which is as good.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-1}
EIGHT_BIT_TOLERANCE = 6e-1
CHECKED_DOCUMENTS = 3
CHECKED_TOKENS = 320  # of each: five chunks of the delta rule, so that its state crosses several


@dataclass(frozen=True)
class SharedHead:
    """The target's frozen embedding and output rows, [V, H] each (one tensor twice if the target ties
    them). `embed_scale`: what the target multiplies its embedding with (Gemma)."""

    embed_tokens: Tensor
    lm_head: Tensor
    embed_scale: float = 1.0

    def to(self, device: torch.device, dtype: torch.dtype) -> SharedHead:
        embed = self.embed_tokens.to(device, dtype)
        tied = self.lm_head is self.embed_tokens
        return SharedHead(embed, embed if tied else self.lm_head.to(device, dtype), self.embed_scale)

    def embed(self, ids: Tensor) -> Tensor:
        rows = self.embed_tokens[ids]
        if self.embed_scale == 1.0:
            return rows
        return rows * torch.tensor(self.embed_scale, dtype=rows.dtype)  # rounded first, as the target does


# (ids [T], their layout, islands) -> features [T, K*H]
Engine = Callable[[Tensor, Layout, Islands], Tensor]


class Target:
    """Features of rows and of single documents. Any number of threads may call one Target once it is warm:
    nothing changes in it any more."""

    def __init__(
        self,
        engine: Engine,
        layer_ids: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        kernels: Any,
        tolerance: float,
    ) -> None:
        self.device, self.dtype, self.layer_ids, self.kernels = device, dtype, layer_ids, kernels
        self._engine, self._tolerance = engine, tolerance
        self._compiled: tuple[int, Islands] | None = None  # the length of rows, and the islands for it

    def features(self, row: Row) -> Tensor:
        """[T, K*H] of a packed row on the host: the outputs of the tapped layers, each document as if it
        were alone. Does not wait for the device. Compiles nothing after `warm_up` with a row as long."""
        return self._features(row.ids, row_lengths(row))

    def features_alone(self, ids: Tensor) -> Tensor:
        """[n, K*H] of one document of any length, by the eager islands."""
        return self._features(ids, [len(ids)])

    def warm_up(self, row: Row) -> None:
        """Compile for rows of this length and hold each compiled island against its eager self. Once,
        before any thread runs; on one device after the other. Raises Refusal."""
        if self.device.type == "cuda":
            self._compile(row, target_islands.fused())
        else:
            self.features(row)
        self.features_alone(row.ids[: row_lengths(row)[0]])

    def _compile(self, row: Row, islands: Islands) -> None:
        self._features(row.ids, row_lengths(row), target_islands.proven(islands))
        self._compiled = len(row.ids), islands

    def check_packing(self, documents: list[Document], budget: int) -> None:
        """Refuse to go on unless packed features equal those of each document alone; names the layer that
        differs."""
        count = min(len(documents), CHECKED_DOCUMENTS, budget)
        size = min(CHECKED_TOKENS, budget // count)
        parts = [Document(d.ids[:size], d.loss_mask[:size], d.key) for d in documents[:count]]
        row = pack(parts, min(budget, sum(len(d.ids) for d in parts) + 8))
        packed = self.features(row)[: row.tokens]
        alone = torch.cat([self.features_alone(d.ids) for d in parts])
        for layer, worst in zip(self.layer_ids, deviations(packed, alone, len(self.layer_ids)), strict=True):
            if not worst <= self._tolerance:
                raise Refusal(
                    f"packed documents change each other: layer {layer} deviates by {worst:.1e} of a token's "
                    f"feature (allowed {self._tolerance:.0e} in {self.dtype}): this target cannot be packed"
                )

    def _features(self, ids: Tensor, lengths: Sequence[int], islands: Islands | None = None) -> Tensor:
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        if islands is None:
            length, compiled = self._compiled or (0, EAGER)
            islands = compiled if len(ids) == length else EAGER
        with on_device, torch.no_grad():
            return self._engine(send(ids, self.device), Layout.of(lengths, self.device), islands)


def deviations(found: Tensor, wanted: Tensor, taps: int) -> list[float]:
    """Per tap of [n, K*H] each, the worst token's |found - wanted| / |wanted|."""
    pairs = zip(found.chunk(taps, dim=-1), wanted.chunk(taps, dim=-1), strict=True)
    return [apart(mine.float(), theirs.float()) for mine, theirs in pairs]


def build(
    decoder: nn.Module,
    layer_ids: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    kernels: Operators | Any,
    *,
    precision: str | None = None,
) -> Target:
    """The target over a Hugging Face text decoder whose weights lie on `device` in `dtype`.

    `decoder` has embed_tokens, layers up to the last tap, rotary_emb; `kernels` has `attention` and
    `recurrence` (packed_ops), and becomes `Target.kernels`. `precision` "fp8" converts the products.
    Raises Refusal where that cannot be.
    """
    config = decoder.config
    decoder.requires_grad_(False).eval()
    tolerance = TOLERANCE[dtype]
    lean = target_layers.is_lean(decoder, config)
    if precision == "fp8":
        fp8.require(device, dtype)
        if not lean:
            raise Refusal(
                f"target.precision fp8 is not there for {type(decoder.layers[0]).__name__}: leave it out"
            )
        tolerance = EIGHT_BIT_TOLERANCE
    if lean:
        engine = lean_engine(decoder, layer_ids, kernels, eight_bit=precision == "fp8")
    else:
        engine = module_engine(decoder, layer_ids, kernels)
    return Target(engine, layer_ids, device, dtype, kernels, tolerance)


def lean_engine(
    decoder: nn.Module, layer_ids: tuple[int, ...], kernels: Operators, *, eight_bit: bool = False
) -> Engine:
    """The forward of target_layers."""
    layers = [
        target_layers.read_layer(layer, decoder.config, eight_bit=eight_bit)
        for layer in decoder.layers[: layer_ids[-1] + 1]
    ]

    def engine(ids: Tensor, row: Layout, islands: Islands) -> Tensor:
        hidden = decoder.embed_tokens(ids)
        # text has one position on each of the three grids of a multimodal rotation
        positions = row.positions.expand(3, 1, -1) if _is_multimodal(decoder) else row.positions[None]
        cos, sin = (t[0] for t in decoder.rotary_emb(hidden, positions))
        state = target_layers.RowState(row, cos, sin, islands, kernels.attention, kernels.recurrence)
        width = hidden.shape[1]
        features = hidden.new_empty(len(ids), len(layer_ids) * width)

        def tap(index: int, output: Tensor) -> None:
            if index in layer_ids:
                place = layer_ids.index(index) * width
                features[:, place : place + width] = output

        target_layers.run(layers, hidden, state, tap)
        return features

    return engine


def module_engine(decoder: nn.Module, layer_ids: tuple[int, ...], kernels: Operators) -> Engine:
    """The forward of the decoder's own modules. Recurrent layers among them are told the borders, which
    transformers hands on since 5.9; what it cannot pack, it says."""
    target_modules.prepare(decoder, layer_ids)
    recurrent = "linear_attention" in (getattr(decoder.config, "layer_types", None) or ())

    def engine(ids: Tensor, row: Layout, islands: Islands) -> Tensor:
        borders = {}
        if recurrent and len(row.lengths) > 1:
            borders = {"cu_seq_lens_q": row.cu_seqlens, "seq_idx": row.seq_idx}
        return torch.cat(target_modules.run(decoder, ids, row, kernels.attention, **borders), dim=-1)

    return engine


def _is_multimodal(decoder: nn.Module) -> bool:
    return hasattr(decoder.rotary_emb, "mrope_section")
