"""Ways to spoil a good checkpoint, each with the verdict and the words that must come of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trainer.finding import FAIL, WARN

FULL, SLIDING = "full_attention", "sliding_attention"


def change(section: str = "", **values: Any) -> Callable[[Path], None]:
    """Set keys of config.json; a value `...` deletes the key."""

    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        at = config[section] if section else config
        for key, value in values.items():
            at.pop(key, None)
            if value is not ...:
                at[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


def store(edit: Callable[[dict[str, torch.Tensor]], Any], **metadata: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors = edit(tensors) or tensors
        save_file(tensors, folder / "model.safetensors", metadata=metadata or {"format": "pt"})

    return spoil


def shards(
    edit: Callable[[Path, dict[str, str]], Any] = lambda folder, where: None,
) -> Callable[[Path], None]:
    """Two shards and their index, then `edit(folder, weight map)`."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names, where = sorted(tensors), {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            file = f"model-0000{number}-of-00002.safetensors"
            save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
        edit(folder, where)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    return spoil


def both(*spoils: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [spoil(folder) for spoil in spoils] and None


def poison(value: float, name: str = "layers.1.mlp.up_proj.weight") -> Callable[[dict], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 5] = value

    return edit


sliding = change(layer_types=[SLIDING, SLIDING], sliding_window=8, use_sliding_window=True)
SPOILED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), FAIL, r"config\.json cannot be read"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), FAIL, r"config\.json cannot be read"),
    "list": (lambda f: (f / "config.json").write_text("[]"), FAIL, "not a mapping"),
    "speculators": (change(speculators_model_type="dflash"), FAIL, "folder of speculators"),
    "architecture": (change(architectures=["Qwen3ForCausalLM"]), FAIL, "architectures is"),
    "model type": (change(model_type="llama"), FAIL, "model_type is 'llama'"),
    "text_config": (change(text_config={}), FAIL, "text_config is there"),
    "quantised config": (change(quantization_config={"bits": 4}), FAIL, "quantization_config"),
    "activation": (change(hidden_act="gelu"), FAIL, "hidden_act is 'gelu'"),
    "bias": (change(attention_bias=True), FAIL, "attention_bias is true"),
    "tied": (change(tie_word_embeddings=True), WARN, "tie_word_embeddings is true"),
    "size missing": (change(head_dim=...), FAIL, "head_dim is missing"),
    "size of text": (change(hidden_size="32"), FAIL, "hidden_size is '32'"),
    "size zero": (change(vocab_size=0), FAIL, "vocab_size is 0"),
    "depth missing": (change(num_target_layers=...), FAIL, "num_target_layers is missing: z-lab"),
    "epsilon": (change(rms_norm_eps=1), FAIL, "rms_norm_eps is 1"),
    "heads": (change(num_key_value_heads=3), FAIL, "4 heads do not divide"),
    "odd head": (change(head_dim=7), FAIL, "head_dim 7 is odd"),
    "nested block": (
        both(change(block_size=...), change("dflash_config", block_size=4)),
        FAIL,
        "block_size is not at the top level",
    ),
    "two blocks": (
        change("dflash_config", block_size=8),
        FAIL,
        r"block_size is 4, dflash_config\.block_size 8",
    ),
    "block of one": (change(block_size=1), FAIL, "block_size is 1"),
    "no section": (change(dflash_config=...), FAIL, r"target_layer_ids is None"),
    "no ids": (change("dflash_config", target_layer_ids=[]), FAIL, r"target_layer_ids is \[\]"),
    "falling ids": (change("dflash_config", target_layer_ids=[5, 1, 9]), FAIL, "do not rise"),
    "id too high": (change("dflash_config", target_layer_ids=[1, 5, 12]), FAIL, "target layer 12 of 12"),
    "last layer": (change("dflash_config", target_layer_ids=[1, 5, 11]), WARN, "layer 11 is the last one"),
    "ids plus one": (change("dflash_config", target_layer_ids=[2, 6, 10]), WARN, "plus one"),
    "speculators key": (change(aux_hidden_state_layer_ids=[2, 6]), WARN, "aux_hidden_state_layer_ids"),
    "fewer ids": (
        change("dflash_config", target_layer_ids=[1, 9]),
        FAIL,
        r"fc\.weight is \[32, 96\].*\[32, 64\]",
    ),
    "no mask": (change("dflash_config", mask_token_id=...), FAIL, "mask_token_id is None"),
    "mask outside": (change("dflash_config", mask_token_id=101), FAIL, "101 has no embedding row"),
    "mask is eos": (change("dflash_config", mask_token_id=2), FAIL, "mask token 2 is eos_token_id"),
    "mask in eos list": (change(eos_token_id=[2, 100]), FAIL, "mask token 100 is eos_token_id"),
    "mask is pad": (change("dflash_config", mask_token_id=0), FAIL, "mask token 0 is pad_token_id"),
    "theta lost": (change(rope_theta=...), FAIL, "rope_theta is missing at the top level"),
    "parameters lost": (change(rope_parameters=...), FAIL, "rope_parameters is missing"),
    "thetas differ": (
        change(rope_theta=10000.0),
        FAIL,
        r"rope_theta is 10000\.0, rope_parameters.rope_theta 50000",
    ),
    "yarn": (change("rope_parameters", rope_type="yarn"), FAIL, "rope_type is 'yarn'"),
    "scaling": (change(rope_scaling={"type": "linear", "factor": 2}), FAIL, "rope_scaling is"),
    "partial": (
        change("rope_parameters", partial_rotary_factor=0.25),
        FAIL,
        r"rope_parameters\.partial_rotary",
    ),
    "partial on top": (change(partial_rotary_factor=0.25), FAIL, "partial_rotary_factor is there"),
    "mrope": (change("rope_parameters", mrope_section=[11, 11, 10]), FAIL, "mrope_section is there"),
    "rope by type": (change(rope_parameters={FULL: {"rope_theta": 1e4}}), FAIL, "differ by layer type"),
    "no types": (change(layer_types=...), FAIL, "layer_types is None"),
    "unknown type": (change(layer_types=[FULL, "linear_attention"]), FAIL, "layer_types is"),
    "types too few": (change(layer_types=[FULL]), FAIL, "names 1 layers of 2"),
    "no window": (both(sliding, change(sliding_window=None)), FAIL, "sliding_window is None with sliding"),
    "window unused": (both(sliding, change(use_sliding_window=False)), FAIL, "use_sliding_window is False"),
    "window for nothing": (change(sliding_window=8), WARN, "but no sliding layer"),
    "mixed": (both(sliding, change(layer_types=[SLIDING, FULL])), WARN, "VLLM_USE_V2_MODEL_RUNNER=1"),
    "two windows": (both(sliding, change("dflash_config", swa_window_size=9)), FAIL, "swa_window_size is 9"),
    "all causal": (change(is_causal=True), FAIL, "is_causal makes full layers causal"),
    "servers differ": (
        change("dflash_config", causal=True),
        FAIL,
        r"vLLM serves layers causal \[yes yes\], SGLang \[no no\]: only vLLM reads dflash_config.causal",
    ),
    "sliding not causal": (both(sliding, change(is_causal=False)), WARN, "makes sliding layers see"),
    "no dtype": (change(dtype=...), WARN, "dtype is missing"),
    "dtype": (change(dtype="float32"), WARN, "dtype is float32"),
    "auto_map": (change(auto_map={"AutoModel": "dflash.DFlashDraftModel"}), WARN, "auto_map names dflash"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FAIL, "no safetensors file"),
    "pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        FAIL,
        r"only pytorch_model\.bin",
    ),
    "other name": (
        lambda f: (f / "model.safetensors").rename(f / "drafter.safetensors"),
        FAIL,
        "neither model.safetensors nor",
    ),
    "cut file": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        FAIL,
        r"model\.safetensors cannot be read",
    ),
    "no format": (store(lambda t: None, made="by hand"), FAIL, "has no metadata format"),
    "stray file": (
        lambda f: shutil.copy(f / "model.safetensors", f / "consolidated.safetensors"),
        WARN,
        "consolidated.safetensors belongs to no index",
    ),
    "missing tensor": (
        store(lambda t: t.pop("norm.weight") is None),
        FAIL,
        r"1 tensor\(s\) missing: norm\.weight",
    ),
    "wrong shape": (store(lambda t: t | {"norm.weight": torch.ones(31)}), FAIL, r"norm\.weight is \[31\]"),
    "embedding": (store(lambda t: t | {"embed_tokens.weight": torch.ones(101, 32)}), FAIL, "is an embedding"),
    "head": (
        store(lambda t: t | {"lm_head.weight": torch.ones(101, 32)}),
        FAIL,
        r"lm_head\.weight is a head",
    ),
    "mask state": (
        store(lambda t: t | {"mask_hidden": torch.ones(32)}),
        FAIL,
        "a learned mask state: vLLM stops",
    ),
    "reduced": (store(lambda t: t | {"d2t": torch.ones(9)}), FAIL, "a reduced vocabulary"),
    "bias tensor": (
        store(lambda t: t | {"layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        FAIL,
        r"1 tensor\(s\) of no layer: layers\.0\.self_attn\.q_proj\.bias",
    ),
    "buffer": (store(lambda t: t | {"rotary_emb.inv_freq": torch.ones(4)}), WARN, "is a buffer"),
    "half prefix": (
        store(lambda t: {(f"model.{n}" if "mlp" in n else n): v for n, v in t.items()}),
        FAIL,
        "6 of 25 names carry the prefix",
    ),
    "NaN": (store(poison(float("nan"))), FAIL, r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"),
    "infinity": (store(poison(float("-inf"))), FAIL, "holds NaN or infinity"),
    "zeros": (store(lambda t: t["fc.weight"].zero_() is None), FAIL, r"fc\.weight is all zeros"),
    "fp32": (store(lambda t: {n: v.float() for n, v in t.items()}), WARN, r"25 tensor\(s\) in F32"),
    "fp8": (
        store(lambda t: t | {"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}),
        FAIL,
        r"1 tensor\(s\) in F8_E4M3: fc\.weight",
    ),
    "lost shard": (
        shards(lambda f, w: (f / w["fc.weight"]).unlink()),
        FAIL,
        r"of-00002\.safetensors is missing",
    ),
    "index elsewhere": (
        shards(lambda f, w: w.update({"fc.weight": w["hidden_norm.weight"]})),
        FAIL,
        "fc.weight is not in the shard",
    ),
    "broken index": (
        both(shards(), lambda f: (f / "model.safetensors.index.json").write_text("{}")),
        FAIL,
        "index.json cannot be read",
    ),
    "twice": (
        shards(
            lambda f, w: save_file(
                load_file(f / w["fc.weight"]) | load_file(f / w["hidden_norm.weight"]),
                f / w["fc.weight"],
                metadata={"format": "pt"},
            )
        ),
        FAIL,
        r"and 7 more is in model-00002-of-00002\.safetensors and in a shard before",
    ),
}
