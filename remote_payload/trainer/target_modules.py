"""Targets whose layers we do not know run through their own modules, with our attention in theirs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainer.errors import Refusal
from trainer.packed_ops import Attention
from trainer.packing import Layout

NAME = "pctrun_packed"

# What models pass to an attention function without changing what it computes here.
_HARMLESS = {
    "dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache", "cache_position",
    "output_attentions", "output_hidden_states", "return_dict", "cu_seq_lens_q", "seq_idx",
}  # fmt: skip

_running = threading.local()  # the row and attention of the forward that this thread is in


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface over the running row: [1, heads, T, D] -> [1, T, heads, D].

    Raises Refusal for an attention that does more than it can say here: a mask or a sink of its own.
    """
    name = type(module).__name__
    if attention_mask is not None:
        raise Refusal(f"the target's {name} wants a mask of its own: such attention cannot be packed")
    if not getattr(module, "is_causal", True):
        raise Refusal(f"the target's {name} looks ahead: a drafter needs a causal target")
    extra = sorted(k for k, v in given.items() if k not in _HARMLESS and v is not None)
    if extra:
        raise Refusal(f"the target's {name} also wants {', '.join(extra)}: not supported on packed rows")
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    parts = (t[0].transpose(0, 1) for t in (query, key, value))
    seen = _running.attention(*parts, _running.layout, scale, given.get("sliding_window"))
    return seen[None], None


def prepare(decoder: nn.Module, layer_ids: tuple[int, ...]) -> None:
    """Let the decoder's layers call `packed_attention`, and show the outputs of `layer_ids`; transformers
    builds no mask for an attention that it has none for."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    for module in decoder.modules():
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation = NAME
    for index in layer_ids:
        decoder.layers[index].register_forward_hook(_see)


def _see(layer: nn.Module, arguments: Any, output: Any) -> None:
    _running.outputs.append(output[0] if isinstance(output, tuple) else output)


@contextlib.contextmanager
def running(row: Layout, attention: Attention) -> Iterator[list[Tensor]]:
    """What prepared modules call within attends over `row`; yields the outputs that are shown meanwhile."""
    _running.layout, _running.attention, _running.outputs = row, attention, []
    try:
        yield _running.outputs
    finally:
        _running.layout = _running.attention = _running.outputs = None


def run(decoder: nn.Module, ids: Tensor, row: Layout, attention: Attention, **given: Any) -> list[Tensor]:
    """Outputs [T, H] of the prepared layers for ids [T]; `given` goes to the model (the borders, for its
    own recurrent layers)."""
    with running(row, attention) as outputs:
        try:
            decoder(input_ids=ids[None], position_ids=row.positions[None], use_cache=False, **given)
        except ValueError as error:  # transformers' word for recurrent layers that it cannot pack
            raise Refusal(f"the target's own modules cannot run packed rows: {error}") from None
        return [output[0] for output in outputs]
