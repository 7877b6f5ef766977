"""How much arithmetic a row costs each side, from the configuration alone: what `split: auto` goes by.

Matrix products only, a multiply and an add counted as two; attention scores and recomputation are left out.
"""

from __future__ import annotations

from typing import Any

from trainer.config import Recipe
from trainer.errors import Refusal
from trainer.geometry import DrafterGeometry


def target_flops(text_config: dict[str, Any], last_layer: int, tokens: int) -> float:
    """One forward of `tokens` tokens through layers 0 to `last_layer` of the target."""
    types = text_config.get("layer_types") or ["full_attention"] * (last_layer + 1)
    layers = types[: last_layer + 1]
    mixing = {kind: _mixing(text_config, kind) for kind in set(layers)}
    return 2.0 * tokens * sum(mixing[kind] + _mlp(text_config) for kind in layers)


def drafter_flops(g: DrafterGeometry, tokens: int, anchors: int) -> float:
    """Forward and backward of one row. The frozen head takes part in the forward and in the gradient of its
    input; everything else also in the gradient of its weight; the context reaches only fc, keys and values.
    """
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    keys = 2 * g.hidden_size * kv
    layer = 2 * g.hidden_size * q + keys + 3 * g.hidden_size * g.intermediate_size
    slots = anchors * g.block_size
    drafted = anchors * (g.block_size - 1)
    # fc's input is the frozen target's, so its gradient is not taken: two products instead of three
    context = tokens * (2 * g.feature_size * g.hidden_size + 3 * g.layers * keys)
    return 2.0 * (context + 3 * slots * g.layers * layer + 2 * drafted * g.hidden_size * g.vocab_size)


def rows_ratio(recipe: Recipe, geometry: DrafterGeometry, text_config: dict[str, Any]) -> float:
    """Arithmetic of the target over that of the drafter, for one row. Raises Refusal."""
    budget = recipe.data.budget
    told = {key: value for key, value in text_config.items() if value}  # null and 0 tell nothing
    try:
        target = target_flops(told, geometry.target_layer_ids[-1], budget)
    except KeyError as error:
        raise Refusal(
            f"{recipe.target.model}/config.json has no {error}, by which topology.split auto goes: "
            "name the split (topology.split=1:1), or take another target"
        ) from None
    return target / drafter_flops(geometry, budget, recipe.train.anchors)


def _mixing(c: dict[str, Any], kind: str) -> int:
    """Parameters of one layer's token mixing: attention, or the gated delta rule of the Qwen3.5 family."""
    hidden = int(c["hidden_size"])
    if kind == "linear_attention":
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        return hidden * (2 * keys + 3 * values + 2 * c["linear_num_value_heads"])
    heads = int(c["num_attention_heads"])
    size = c.get("head_dim") or hidden // heads
    queries, keys = heads * size, (c.get("num_key_value_heads") or heads) * size
    gated = bool(c.get("attn_output_gate"))
    return hidden * ((2 + gated) * queries + 2 * keys)


def _mlp(c: dict[str, Any]) -> int:
    """Parameters of one layer's MLP that a token meets; of a mixture only its active experts."""
    hidden = int(c["hidden_size"])
    if c.get("num_experts_per_tok") and c.get("moe_intermediate_size"):
        shared = c.get("shared_expert_intermediate_size") or 0
        return 3 * hidden * (c["num_experts_per_tok"] * c["moe_intermediate_size"] + shared)
    return 3 * hidden * int(c["intermediate_size"])
