"""How long a cold start takes before the first step: kernels proven twice, weights read onto the device.

`python -m bench.loading --config qwen3.5-27b --layers 16` writes a random checkpoint of that geometry to
shared memory, reads it back as a run would, and removes it. Run it twice to see what the caches save.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.common import config_folder, default_device, machine, peak_memory, say, section, table
from bench.random_target import random_decoder, small_hybrid, taps, text_config
from trainer.kernels import prove
from trainer.target_loading import load_target

SHARD_BYTES = 5 << 30
PREFIX = "model.language_model."  # as a multimodal checkpoint names its text decoder


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    device = default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = small_hybrid() if args.small else text_config(config_folder(args.config))
    layers = min(args.layers, config.num_hidden_layers)
    ids = taps(config, layers)
    say(machine(device))
    failures: list[str] = []
    rows: list[tuple[object, ...]] = []
    folder = Path(tempfile.mkdtemp(prefix="pctrun-loading-", dir=args.folder))
    try:
        with section(f"a random checkpoint of {layers} layers in {folder}", failures):
            began = time.monotonic()
            size = write(config, layers, folder, device, dtype)
            rows.append(("written", f"{size / 2**30:.1f} GiB", f"{time.monotonic() - began:.1f} s"))
        with section("kernels", failures):
            for name in ("kernels proven", "kernels proven again"):
                began = time.monotonic()
                report = prove(config, device, dtype, tokens=args.tokens, longest=min(4096, args.tokens))
                rows.append((name, "", f"{time.monotonic() - began:.1f} s"))
            for line in report.lines:
                say(f"  {line}")
        with section("weights", failures):
            geometry: Any = SimpleNamespace(target_layer_ids=ids)
            with peak_memory(device) as peak:
                began = time.monotonic()
                load_target(str(folder), geometry, device, dtype, tokens=args.tokens, on_progress=_said)
                took = time.monotonic() - began
            rows.append(("target loaded", f"{size / 2**30 / took:.1f} GiB/s", f"{took:.1f} s"))
            rows += [("peak memory", f"{gib:.1f} GiB", "") for gib in peak]
    finally:
        shutil.rmtree(folder)
    say()
    table(("what", "size or rate", "time"), rows)
    say(f"failed: {', '.join(failures)}" if failures else "all sections ran")
    return 1 if failures else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.loading", description=__doc__)
    parser.add_argument("--config", default="qwen3.5-27b", help="a folder under bench/configs, or a model's")
    parser.add_argument("--layers", type=int, default=16, help="layers to write and read (.8 GB each at 27B)")
    parser.add_argument("--tokens", type=int, default=49_152, help="the row that kernels are tuned on")
    parser.add_argument("--folder", default="/dev/shm", help="where the checkpoint lies for the while")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    args = parser.parse_args(argv)
    args.tokens = min(args.tokens, 512) if args.small else args.tokens
    return args


def write(config: Any, layers: int, folder: Path, device: torch.device, dtype: torch.dtype) -> int:
    """A model folder as a hub has it, with random weights; returns the bytes of its tensors."""
    config.save_pretrained(folder)
    decoder = random_decoder(config, layers, device, dtype)
    tensors = {PREFIX + name: tensor.cpu() for name, tensor in decoder.state_dict().items()}
    tensors["lm_head.weight"] = tensors[f"{PREFIX}embed_tokens.weight"].clone()
    for number, shard in enumerate(_shards(tensors), 1):
        save_file(shard, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def _shards(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _said(text: str) -> None:
    say(f"  {text}")


if __name__ == "__main__":
    sys.exit(main())
