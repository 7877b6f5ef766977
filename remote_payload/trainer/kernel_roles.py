"""What a target calls beside matrix products: each role's reference, fast candidates and a sample call.

Nothing fast is imported before it is tried: a package that is not installed is a finding, not an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer import packed_ops
from trainer.errors import Refusal
from trainer.installing import install_line
from trainer.packing import CHUNK, Layout
from trainer.target_islands import causal_convolution
from trainer.target_layers import is_lean_config

Call = Callable[..., Tensor]
Draw = Callable[..., Tensor]
LAYER_KINDS = {"full_attention", "sliding_attention", "linear_attention"}


@dataclass(frozen=True)
class Candidate:
    """A fast implementation: `load` imports it and gives what the engine calls and the function behind it."""

    package: str  # as pip names it
    load: Callable[[], tuple[Call, Callable[..., Any]]]
    built_in: bool = False  # the target calls it unasked: there is nothing to hand to the engine


@dataclass(frozen=True)
class Role:
    """`reference` is what others are held against; `fallback` runs when no candidate wins (None: the engine's
    own), `behind` is the function in it. `sample(row, draw)` makes the arguments of a call; `draw(*shape)`
    gives normal numbers in the run's dtype."""

    name: str
    reference: Call
    fallback: Call | None
    behind: Callable[..., Any]
    candidates: tuple[Candidate, ...]
    sample: Callable[[Layout, Draw], tuple[Any, ...]]
    mend: str


def layer_kinds(config: Any) -> set[str]:
    """The kinds of a text configuration's layers. Raises Refusal for one whose packing is not known here:
    its documents would share state in silence."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    odd = sorted(kinds - LAYER_KINDS)
    if "linear_attention" in kinds and not hasattr(config, "linear_num_key_heads"):
        odd = ["recurrent"]  # MiniMax's, Mamba's: transformers calls all alike
    if odd:
        raise Refusal(
            f"{type(config).__name__} has {', '.join(odd)} layers, whose packing is not known here: choose a "
            "target with full, sliding or linear (gated delta) attention"
        )
    return kinds


def roles(config: Any) -> list[Role]:
    """The roles of a text configuration's layers. Raises Refusal as `layer_kinds` does."""
    kinds = layer_kinds(config)
    found = [_attention(config, "sliding_attention" in kinds)]
    if "linear_attention" in kinds:
        found += [_recurrence(config), _convolution(config)]  # transformers' own modules call fla's, too
    return found


def _attention(config: Any, sliding: bool) -> Role:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = config.sliding_window if sliding else None

    def sample(row: Layout, draw: Draw) -> tuple[Any, ...]:
        query, key, value = (draw(_length(row), count, size) for count in (heads, kv_heads, kv_heads))
        return query, key, value, row, size**-0.5, window

    def load() -> tuple[Call, Callable[..., Any]]:
        from torch.nn.attention.varlen import varlen_attn

        return packed_ops.varlen_attention, varlen_attn

    def load_by_document() -> tuple[Call, Callable[..., Any]]:
        return packed_ops.long_document_attention, packed_ops.long_document_attention

    return Role(
        "attention",
        packed_ops.document_attention,
        packed_ops.document_attention,
        F.scaled_dot_product_attention,
        (Candidate("torch", load), Candidate("torch", load_by_document)),
        sample,
        f"it needs a GPU of the Ampere generation or newer and torch 2.10: {install_line('torch>=2.10')}",
    )


def _recurrence(config: Any) -> Role:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    size, value_size = config.linear_key_head_dim, config.linear_value_head_dim

    def sample(row: Layout, draw: Draw) -> tuple[Any, ...]:
        length = _length(row)
        value = draw(length, value_heads, value_size)
        query, key = (F.normalize(draw(length, heads, size).float(), dim=-1).to(value) for _ in range(2))
        decay = -F.softplus(draw(length, value_heads).float() - 3)  # a state that outlives some twenty tokens
        return query, key, value, decay, draw(length, value_heads).sigmoid(), row

    def load() -> tuple[Call, Callable[..., Any]]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return packed_ops.fla_recurrence, chunk_gated_delta_rule

    def load_qla() -> tuple[Call, Callable[..., Any]]:
        from flash_qla import chunk_gated_delta_rule

        # Rows of few documents run on narrower tiles, and nvcc takes 20 s for each width: a run must not meet
        # the first row of a kind on its way.
        zeros = functools.partial(torch.zeros, dtype=torch.bfloat16, device=torch.device("cuda"))
        processors = torch.cuda.get_device_properties().multi_processor_count
        for documents in range(1, processors // value_heads + 2):
            packed_ops.qla_recurrence(*sample(Layout.of([CHUNK] * documents, torch.device("cuda")), zeros))
        return packed_ops.qla_recurrence, chunk_gated_delta_rule

    candidates = [Candidate("flash-linear-attention", load)]
    if size == value_size == 128 and is_lean_config(config):  # transformers' modules call fla by themselves
        candidates.append(Candidate("flash-qla", load_qla))
    return Role(
        "recurrence",
        packed_ops.document_recurrence,
        packed_ops.document_recurrence,
        torch_chunk_gated_delta_rule,
        tuple(candidates),
        sample,
        install_line("flash-linear-attention"),
    )


def _convolution(config: Any) -> Role:
    size = math.gcd(config.linear_key_head_dim, config.linear_value_head_dim)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    channels = 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim

    def sample(row: Layout, draw: Draw) -> tuple[Any, ...]:
        weight = draw(config.linear_conv_kernel_dim, channels).t()  # stored tap by tap, as the engine has it
        return draw(_length(row), channels), weight, row

    def load_heads() -> tuple[Call, Callable[..., Any]]:
        from trainer.gpu.heads import convolved_heads

        def call(x: Tensor, weight: Tensor, row: Layout) -> Tensor:
            return convolved_heads(x, weight, row.positions, 0, channels // size, size, unit=False).flatten(1)

        return call, convolved_heads

    def load_package() -> tuple[Call, Callable[..., Any]]:
        from causal_conv1d import causal_conv1d_fn

        def call(x: Tensor, weight: Tensor, row: Layout) -> Tensor:
            made = causal_conv1d_fn(
                x.t()[None], weight.contiguous(), None, seq_idx=row.seq_idx, activation="silu"
            )
            return made[0].t()

        return call, causal_conv1d_fn

    if is_lean_config(config):
        behind, candidate, mend = causal_convolution, Candidate("triton", load_heads, True), "torch>=2.10"
    else:  # transformers packs by this package or not at all
        behind, candidate = F.conv1d, Candidate("causal-conv1d", load_package, True)
        mend = "causal-conv1d"
    return Role("convolution", document_convolution, None, behind, (candidate,), sample, install_line(mend))


def document_convolution(x: Tensor, weight: Tensor, row: Layout) -> Tensor:
    """Depthwise causal convolution, then SiLU, document by document: x [T, D], weight [D, W] -> [T, D]."""
    outputs = []
    for part in x.split([length for length in row.lengths if length]):
        padded = F.pad(part.t()[None], (weight.shape[1] - 1, 0))
        outputs.append(F.silu(F.conv1d(padded, weight[:, None], groups=len(weight)))[0].t())
    return torch.cat(outputs)


def _length(row: Layout) -> int:
    return sum(row.lengths)
