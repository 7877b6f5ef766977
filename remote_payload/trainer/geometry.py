"""The drafter's shape: the recipe completed from the target's config.json, without importing torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Recipe
from trainer.errors import Refusal

# Ids that no text uses but whose embedding row exists, as the published drafters chose them.
_MASK_TOKEN_IDS = {
    "qwen3": 151669,
    "qwen3_moe": 151669,
    "qwen3_5": 248070,
    "qwen3_5_text": 248070,
    "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070,
}
# What is reckoned with here and in work.py: null where a model has no such part.
_COUNTS = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


@dataclass(frozen=True)
class DrafterGeometry:
    """Every number that fixes the drafter's tensors and its checkpoint's config.json."""

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_id: int | list[int] | None
    pad_token_id: int | None

    @property
    def feature_size(self) -> int:
        """K*H: the width of one token's concatenated taps."""
        return len(self.target_layer_ids) * self.hidden_size

    def parameter_count(self) -> int:
        """Trained parameters: fc, hidden_norm, the layers, norm; embeddings and head are the target's."""
        h, q, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * h * q + 2 * h * kv + 2 * self.head_dim + 3 * h * self.intermediate_size + 2 * h
        return self.feature_size * h + 2 * h + self.layers * layer


def tap_layer_ids(num_layers: int, taps: int) -> tuple[int, ...]:
    """The paper's choice: evenly from layer 1 to layer L-3; L=64, taps=5 gives 1, 16, 31, 46, 61."""
    if taps == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))


def target_text_config(model: str) -> dict[str, Any]:
    """The language model's part of `<model>/config.json` (multimodal configurations nest it)."""
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(
            f"target model {model}: {path} cannot be read ({error.strerror}); put the model folder there"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: not JSON ({error})") from None
    text = config.get("text_config") or {} if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise Refusal(f"{path}: not the configuration of a model: fetch the model again")
    return {**config, **text}


def is_hybrid(text_config: dict[str, Any]) -> bool:
    """Whether some layers are recurrent: their kernels come from packages beside torch."""
    kinds = text_config.get("layer_types") or []  # older configurations leave it to the default
    return "linear_attention" in kinds or "linear_num_value_heads" in text_config


def resolve(recipe: Recipe) -> DrafterGeometry:
    """Raises Refusal when the target's configuration cannot carry the recipe."""
    target = target_text_config(recipe.target.model)
    for name, value in _misshapen(target):
        raise Refusal(f"{recipe.target.model}/config.json: {name} is {value!r}: fetch the model again")
    try:
        hidden, vocab, depth = target["hidden_size"], target["vocab_size"], target["num_hidden_layers"]
        intermediate = recipe.drafter.intermediate_size or target["intermediate_size"]
    except KeyError as error:
        raise Refusal(
            f"{recipe.target.model}/config.json has no {error}: not a causal language model"
        ) from None
    sizes = ("hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size")
    for name, value in zip(sizes, (hidden, vocab, depth, intermediate), strict=True):
        if not isinstance(value, int) or value < 1:
            raise Refusal(f"{recipe.target.model}/config.json: {name} is {value!r}: fetch the model again")
    if recipe.target.layer_ids is None and recipe.target.taps > depth:
        raise Refusal(
            f"target.taps is {recipe.target.taps}: {recipe.target.model} has {depth} layers; name fewer, or "
            "target.layer_ids"
        )
    ids = recipe.target.layer_ids or tap_layer_ids(depth, recipe.target.taps)
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= depth:
        raise Refusal(
            f"target.layer_ids {list(ids)}: name rising layers within 0 to {depth - 1}, or fewer target.taps"
        )
    drafter = recipe.drafter
    types = drafter.layer_types or ("full_attention",) * drafter.layers
    return DrafterGeometry(
        hidden_size=hidden,
        vocab_size=vocab,
        num_target_layers=depth,
        target_layer_ids=ids,
        block_size=drafter.block_size,
        mask_token_id=_mask_token_id(recipe, target),
        layers=drafter.layers,
        heads=drafter.heads,
        kv_heads=drafter.kv_heads,
        head_dim=drafter.head_dim,
        intermediate_size=intermediate,
        layer_types=types,
        sliding_window=drafter.sliding_window if "sliding_attention" in types else None,
        rope_theta=drafter.rope_theta or _rope_theta(target),
        rms_norm_eps=target.get("rms_norm_eps") or 1e-6,
        max_position_embeddings=target.get("max_position_embeddings") or 32768,
        eos_token_id=target.get("eos_token_id"),
        pad_token_id=target.get("pad_token_id"),
    )


def _misshapen(target: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of what is read of a configuration and is of another kind than any model has it."""

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31

    def words(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)

    fits: dict[str, Callable[[Any], bool]] = dict.fromkeys(_COUNTS, whole)
    fits |= {
        "layer_types": words,
        "model_type": lambda value: isinstance(value, str),
        "pad_token_id": lambda value: isinstance(value, int),  # -1 in some
        "eos_token_id": lambda value: all(
            isinstance(each, int) for each in (value if isinstance(value, list) else [value])
        ),
        "rms_norm_eps": _positive,
        "max_position_embeddings": whole,
    }
    for name, fit in fits.items():
        if target.get(name) is not None and not fit(target[name]):
            yield name, target[name]


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")  # NaN is neither


def _mask_token_id(recipe: Recipe, target: dict[str, Any]) -> int:
    vocab = target["vocab_size"]
    chosen = recipe.drafter.mask_token_id
    if chosen is None:
        chosen = _MASK_TOKEN_IDS.get(target.get("model_type", ""))
    if chosen is None:
        raise Refusal(
            f"drafter.mask_token_id is not set and model type {target.get('model_type')!r} has no known one: "
            "set it to a token id that no text uses"
        )
    if chosen >= vocab:
        raise Refusal(
            f"drafter.mask_token_id {chosen} has no embedding row: the vocabulary ends at {vocab - 1}"
        )
    eos = target.get("eos_token_id")
    if chosen in ([*eos] if isinstance(eos, list) else [eos]) or chosen == target.get("pad_token_id"):
        raise Refusal(
            f"drafter.mask_token_id {chosen} is the target's end or padding token: choose an unused one"
        )
    return chosen


def _rope_theta(target: dict[str, Any]) -> float:
    """Only the base is taken over: copying partial or multimodal rotary settings makes acceptance vanish."""
    parameters = target.get("rope_parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    parameters = parameters.get("full_attention") or parameters  # Gemma 3 has one set a layer type
    theta = target.get("rope_theta") or parameters.get("rope_theta") or 10000.0
    if not _positive(theta):
        raise Refusal(f"the target's config.json: rope_theta is {theta!r}: set drafter.rope_theta")
    return float(theta)
