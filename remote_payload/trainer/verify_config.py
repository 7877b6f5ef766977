"""A drafter's config.json is read differently by three servers; each wrong key costs acceptance silently.

Read from the loaders of vLLM 0.33 (`qwen3_dflash.py`, `eagle3_utils.py`), SGLang 0.5.23 (`dflash.py`,
`dflash_utils.py`) and z-lab's own code, which is pinned to transformers 4.57. Every function takes the parsed
file and gives findings; none raises for a wrong type, because a checkpoint of others may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.finding import Finding, fail, ok, or_ok, warn

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


MOST_LAYERS = 1000  # a drafter has a handful; a table for what a hostile file says would fill the memory


def is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def dflash_of(config: dict[str, Any]) -> dict[str, Any]:
    section = config.get("dflash_config")
    return section if isinstance(section, dict) else {}


def layer_ids_of(config: dict[str, Any]) -> list[int] | None:
    """`dflash_config.target_layer_ids` if it is a list of whole numbers."""
    ids = dflash_of(config).get("target_layer_ids")
    return ids if isinstance(ids, list) and ids and all(is_count(i, 0) for i in ids) else None


def layer_types_of(config: dict[str, Any]) -> list[str] | None:
    types = config.get("layer_types")
    good = isinstance(types, list) and types and all(t in (FULL, SLIDING) for t in types)
    return types if good else None


def check_config(config: dict[str, Any]) -> list[Finding]:
    """All findings of one config.json."""
    return [
        *or_ok(_kind(config), "architecture DFlashDraftModel over qwen3, as the servers look it up"),
        *or_ok(_sizes(config), "sizes are there and agree with each other"),
        *or_ok(_block(config), f"block_size {config.get('block_size')} at the top level"),
        *or_ok(_layer_ids(config), f"target layers {dflash_of(config).get('target_layer_ids')}"),
        *or_ok(_mask_token(config), f"mask token {dflash_of(config).get('mask_token_id')}"),
        *or_ok(_rope(config), f"RoPE plain, theta {config.get('rope_theta')} written both ways"),
        *or_ok(_attention(config), "layer types and sliding window agree"),
        *_causality(config),
        *or_ok(_dtype(config), "dtype bfloat16"),
    ]


def _kind(config: dict[str, Any]) -> Iterator[Finding]:
    if config.get("speculators_model_type"):
        yield fail(
            "this is a folder of speculators, whose layer ids are one higher",
            "SGLang and z-lab's code cannot read it; export the drafter in the z-lab layout",
        )
    if config.get("architectures") != ["DFlashDraftModel"]:
        yield fail(
            f"architectures is {config.get('architectures')}",
            'vLLM and SGLang find the model by it: write ["DFlashDraftModel"]',
        )
    if config.get("model_type") != "qwen3":
        yield fail(f"model_type is {config.get('model_type')!r}", 'AutoConfig needs "qwen3"')
    if "text_config" in config:
        yield fail("text_config is there", "a drafter's keys stand at the top level: remove the section")
    if config.get("quantization_config"):
        yield fail("quantization_config is there", "drafters are served in bf16: export without it")
    if config.get("hidden_act") != "silu":
        yield fail(f"hidden_act is {config.get('hidden_act')!r}", "SGLang computes silu only")
    if config.get("attention_bias"):
        yield fail("attention_bias is true", "the layout has no biases: write false")
    if config.get("tie_word_embeddings"):
        yield warn("tie_word_embeddings is true", "the drafter has neither embedding nor head: write false")


def _sizes(config: dict[str, Any]) -> Iterator[Finding]:
    for key in (*SIZES, "num_target_layers"):
        if key not in config:
            why = "z-lab's code asks for it even when layer ids are given" if "target" in key else "write it"
            yield fail(f"{key} is missing", why)
        elif not is_count(config[key]):
            yield fail(f"{key} is {config[key]!r}", "write a whole number above 0")
    if is_count(layers := config.get("num_hidden_layers"), MOST_LAYERS + 1):
        yield fail(f"num_hidden_layers is {layers}", "no drafter is that deep: write its number of layers")
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1e-2:
        yield fail(f"rms_norm_eps is {eps!r}", "write the value it was trained with, e.g. 1e-6")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if is_count(heads) and is_count(kv_heads) and heads % kv_heads:
        yield fail(f"{heads} heads do not divide among {kv_heads} key-value heads", "correct either")
    if is_count(config.get("head_dim")) and config["head_dim"] % 2:
        yield fail(f"head_dim {config['head_dim']} is odd", "rotary positions need an even number")


def _block(config: dict[str, Any]) -> Iterator[Finding]:
    top, nested = config.get("block_size"), dflash_of(config).get("block_size")
    if top is None:
        yield fail("block_size is not at the top level", "z-lab's code and MLX read it only there")
    elif not is_count(top, 2):
        yield fail(f"block_size is {top!r}", "a block holds its anchor and at least one draft slot")
    elif nested not in (None, top):
        yield fail(
            f"block_size is {top}, dflash_config.block_size {nested}",
            "servers read one or the other: make them agree",
        )


def _layer_ids(config: dict[str, Any]) -> Iterator[Finding]:
    ids, depth = layer_ids_of(config), config.get("num_target_layers")
    if ids is None:
        yield fail(
            f"dflash_config.target_layer_ids is {dflash_of(config).get('target_layer_ids')!r}",
            "write the 0-based layers whose output was tapped",
        )
        return
    if ids != sorted(set(ids)):
        yield fail(
            f"target layers {ids} do not rise", "fc's columns follow their order: list each once, rising"
        )
    if is_count(depth) and ids[-1] >= depth:
        yield fail(f"target layer {ids[-1]} of {depth} layers", f"ids are 0-based, at most {depth - 1}")
    elif is_count(depth) and ids[-1] == depth - 1:
        yield warn(
            f"target layer {ids[-1]} is the last one",
            "transformers gives its output after the final norm, servers before it: tap an earlier layer",
        )
    elif is_count(depth, 5) and len(ids) > 1:
        usual = [round(1 + i * (depth - 4) / (len(ids) - 1)) for i in range(len(ids))]
        if ids == [i + 1 for i in usual]:
            yield warn(
                f"target layers {ids} are the usual {usual} plus one",
                "this layout counts from 0 and vLLM adds one itself; right only if these outputs were tapped",
            )
    if "aux_hidden_state_layer_ids" in config:
        yield warn("aux_hidden_state_layer_ids is there", "a key of speculators (ids plus one): remove it")


def _mask_token(config: dict[str, Any]) -> Iterator[Finding]:
    mask, vocab = dflash_of(config).get("mask_token_id"), config.get("vocab_size")
    if not is_count(mask, 0):
        yield fail(
            f"dflash_config.mask_token_id is {mask!r}",
            "without an id SGLang adds a token of its own: write the id it was trained with",
        )
        return
    if is_count(vocab) and mask >= vocab:
        yield fail(f"mask token {mask} has no embedding row", f"the vocabulary ends at {vocab - 1}")
    for key in ("eos_token_id", "pad_token_id"):
        value = config.get(key)
        if mask in (value if isinstance(value, list) else [value]):
            yield fail(f"mask token {mask} is {key}", "it must be a token that no text uses")


def _rope(config: dict[str, Any]) -> Iterator[Finding]:
    theta, parameters = config.get("rope_theta"), config.get("rope_parameters")
    if not isinstance(theta, int | float):
        yield fail(
            "rope_theta is missing at the top level",
            "transformers 4, which z-lab's code is pinned to, would take 10000: write it beside "
            "rope_parameters",
        )
    if not isinstance(parameters, dict):
        yield fail(
            "rope_parameters is missing",
            'vLLM reads them: write {"rope_type": "default", "rope_theta": …}',
        )
        parameters = {}
    elif any(isinstance(value, dict) for value in parameters.values()):
        yield fail("rope_parameters differ by layer type", "no server does that for a drafter: write one set")
    else:
        inner = parameters.get("rope_theta")
        if isinstance(theta, int | float) and inner != theta:
            yield fail(f"rope_theta is {theta}, rope_parameters.rope_theta {inner}", "make them agree")
        if parameters.get("rope_type") != "default":
            yield fail(
                f"rope_parameters.rope_type is {parameters.get('rope_type')!r}",
                "drafters are trained with plain RoPE: write default",
            )
    scaling = config.get("rope_scaling")
    if scaling:
        yield fail(f"rope_scaling is {scaling}", "it came from the target; plain RoPE has null")
    for section, values in (("", config), ("rope_parameters.", parameters)):
        for key in sorted(values):
            partial = key == "partial_rotary_factor" and values[key] != 1
            if partial or "mrope" in key:
                yield fail(
                    f"{section}{key} is there",
                    "the target's, not the drafter's: acceptance falls to nothing while training looks fine; "
                    "remove it",
                )


def _attention(config: dict[str, Any]) -> Iterator[Finding]:
    depth, types = config.get("num_hidden_layers"), layer_types_of(config)
    if types is None:
        yield fail(
            f"layer_types is {config.get('layer_types')!r}",
            f"every loader indexes it: list {FULL} or {SLIDING} for each layer",
        )
        return
    if types and is_count(depth) and len(types) != depth:
        yield fail(f"layer_types names {len(types)} layers of {depth}", "name each layer")
    window, uses = config.get("sliding_window"), config.get("use_sliding_window")
    if SLIDING in types:
        if not is_count(window):
            yield fail(f"sliding_window is {window!r} with sliding layers", "write the trained window")
        if uses is not True:
            yield fail(
                f"use_sliding_window is {uses!r} with sliding layers",
                "Qwen3Config then drops sliding_window: write true",
            )
    elif uses or window is not None:
        yield warn(
            f"sliding_window {window}, use_sliding_window {uses}, but no sliding layer",
            "write null and false",
        )
    if len(set(types)) == 2:
        yield warn(
            "full and sliding layers are mixed",
            "vLLM serves that only with VLLM_USE_V2_MODEL_RUNNER=1",
        )
    swa = dflash_of(config).get("swa_window_size")
    if swa is not None and swa != window:
        yield fail(f"dflash_config.swa_window_size is {swa}, sliding_window {window}", "make them agree")


def served_causality(config: dict[str, Any], server: str) -> list[bool]:
    """Whether each layer is causal inside the block in `vllm` or `sglang`: top-level `is_causal` overrides
    every layer, in vLLM `dflash_config.causal` next; else sliding layers are causal, full ones are not."""
    types = layer_types_of(config) or []
    override = config.get("is_causal")
    if override is None and server == "vllm":
        override = dflash_of(config).get("causal")
    return [t == SLIDING if override is None else bool(override) for t in types]


def _causality(config: dict[str, Any]) -> Iterator[Finding]:
    types = layer_types_of(config)
    if types is None:
        return
    trained = [t == SLIDING for t in types]
    vllm, sglang = served_causality(config, "vllm"), served_causality(config, "sglang")
    key = "is_causal" if config.get("is_causal") is not None else "dflash_config.causal"
    if vllm != sglang:
        yield fail(
            f"vLLM serves layers causal {_yes_no(vllm)}, SGLang {_yes_no(sglang)}",
            f"only vLLM reads {key}: remove it",
        )
    elif any(served and not rule for served, rule in zip(vllm, trained, strict=True)):
        yield fail(
            f"{key} makes full layers causal inside the block",
            "they are trained to see the whole block: remove the key",
        )
    elif vllm != trained:
        yield warn(
            f"{key} makes sliding layers see the whole block", "right only if trained so; else remove it"
        )
    else:
        yield ok(f"causal inside the block as served: {_yes_no(vllm)}")


def _yes_no(layers: list[bool]) -> str:
    return "[" + " ".join("yes" if causal else "no" for causal in layers) + "]"


def _dtype(config: dict[str, Any]) -> Iterator[Finding]:
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is None:
        yield warn("dtype is missing", "loaders then guess: write bfloat16")
    elif dtype != "bfloat16":
        yield warn(f"dtype is {dtype}", "servers draft in bf16: write bfloat16")


def check_target(config: dict[str, Any], target: dict[str, Any]) -> list[Finding]:
    """The drafter's config.json against the target's text configuration."""
    return or_ok(_target(config, target), "sizes, depth, mask and end tokens fit the target")


def _target(config: dict[str, Any], target: dict[str, Any]) -> Iterator[Finding]:
    for mine, theirs in (
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
    ):
        if config.get(mine) != target.get(theirs):
            yield fail(
                f"{mine} is {config.get(mine)}, the target's {theirs} {target.get(theirs)}",
                "this drafter was trained for another model",
            )
    ids, depth = layer_ids_of(config), target.get("num_hidden_layers")
    if ids and is_count(depth) and max(ids) >= depth:
        yield fail(
            f"target layer {max(ids)} of the target's {depth}", "this drafter was trained for another model"
        )
    mask = dflash_of(config).get("mask_token_id")
    for key in ("eos_token_id", "pad_token_id"):
        theirs = target.get(key)
        if is_count(mask, 0) and mask in (theirs if isinstance(theirs, list) else [theirs]):
            yield fail(f"mask token {mask} is the target's {key}", "it must be a token that no text uses")
    if config.get("eos_token_id") != target.get("eos_token_id"):
        yield warn(
            f"eos_token_id is {config.get('eos_token_id')}, the target's {target.get('eos_token_id')}",
            "write the target's",
        )
    positions, theirs = config.get("max_position_embeddings"), target.get("max_position_embeddings")
    if is_count(positions) and is_count(theirs) and positions < theirs:
        yield warn(
            f"max_position_embeddings is {positions}, the target's {theirs}",
            "servers may refuse longer contexts: write the target's",
        )
