"""Training is for serving: the drafter as the z-lab folder that vLLM, SGLang and z-lab's own code load.

Two things make a served drafter silently useless, so they are fixed here and tested: rotary settings are
written plainly and twice (transformers 4 reads `rope_theta`, transformers 5 `rope_parameters`), never with
partial or multimodal keys of the target; and `is_causal` is left out, because it would override the rule of
every layer.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.drafter import Drafter
from trainer.errors import Refusal, last_line
from trainer.geometry import DrafterGeometry

WEIGHTS = "model.safetensors"


def checkpoint_config(g: DrafterGeometry) -> dict[str, Any]:
    """The content of config.json; SpecForge's qwen3.6-27b-dflash.json has the same keys."""
    sliding = "sliding_attention" in g.layer_types
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": g.block_size,
        "dflash_config": {
            "mask_token_id": g.mask_token_id,
            "target_layer_ids": list(
                g.target_layer_ids
            ),  # 0-based layers whose output is tapped; vLLM adds 1
        },
        "num_target_layers": g.num_target_layers,
        "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": g.rms_norm_eps,
        "vocab_size": g.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": list(g.layer_types),
        "use_sliding_window": sliding,  # without it Qwen3Config drops sliding_window
        "sliding_window": g.sliding_window if sliding else None,
        "max_window_layers": g.layers,
        "max_position_embeddings": g.max_position_embeddings,
        "rope_theta": g.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": g.rope_theta},
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": g.eos_token_id,
        "pad_token_id": g.pad_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def export(drafter: Drafter, geometry: DrafterGeometry, out_dir: Path) -> Path:
    """Write bf16 weights and config.json to `out_dir`, which appears whole; an earlier export is replaced.

    The target's embedding and head are not part of it: servers share their own. Raises Refusal where the disk
    does not take it.
    """
    out_dir = Path(out_dir)
    incoming = out_dir.with_name(f".{out_dir.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    try:
        incoming.mkdir(parents=True)
        save_file(tensors, incoming / WEIGHTS, metadata={"format": "pt"})
        (incoming / WEIGHTS).chmod(0o644)
        (incoming / "config.json").write_text(json.dumps(checkpoint_config(geometry), indent=2) + "\n")
        for path in incoming.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(incoming, ignore_errors=True)
        raise Refusal(
            f"{out_dir} cannot be written ({error}): free room, then continue from the last checkpoint"
        ) from None
    if out_dir.exists():
        earlier = out_dir.with_name(f".{out_dir.name}.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        out_dir.rename(earlier)
        incoming.rename(out_dir)
        shutil.rmtree(earlier)
    else:
        incoming.rename(out_dir)
    return out_dir


def geometry_of(config: dict[str, Any]) -> DrafterGeometry:
    """The inverse of checkpoint_config; raises KeyError for a missing key."""
    return DrafterGeometry(
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        num_target_layers=config["num_target_layers"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        layer_types=tuple(config["layer_types"]),
        sliding_window=config["sliding_window"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        max_position_embeddings=config["max_position_embeddings"],
        eos_token_id=config["eos_token_id"],
        pad_token_id=config["pad_token_id"],
    )


def load_export(folder: Path) -> Drafter:
    """A z-lab checkpoint folder as a drafter, in the folder's bf16, on the CPU.

    Raises Refusal for a folder that cannot be read, lacks a key, or whose tensors are not the drafter's."""
    folder = Path(folder)
    try:
        geometry = geometry_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        tensors = load_file(folder / WEIGHTS)
    except KeyError as error:
        raise Refusal(f"{folder}/config.json has no {error}: not a DFlash checkpoint") from None
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise Refusal(f"{folder} cannot be read as a DFlash checkpoint ({error})") from None
    try:
        if geometry.layers > len(tensors):  # before as many are built
            raise ValueError(f"num_hidden_layers is {geometry.layers}")
        with torch.device("meta"):
            drafter = Drafter(geometry)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        reason = last_line(error)
        raise Refusal(f"{folder}/config.json asks for the impossible ({reason}): fetch it again") from None
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise Refusal(
            f"{folder}/{WEIGHTS}: {name} is {found.get(name, 'missing')}, "
            f"config.json asks for {wanted.get(name, 'no such tensor')}"
        )
    drafter.load_state_dict(tensors, assign=True)
    return drafter
