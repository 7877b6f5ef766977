"""What bench.pipeline can be asked, and the recipe that the answers make."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.common import config_folder
from bench.random_target import taps, text_config
from trainer.config import DataConfig, DrafterConfig, Recipe, TargetConfig, TopologyConfig, TrainConfig
from trainer.geometry import DrafterGeometry, resolve


def text(options: argparse.Namespace) -> Any:
    return text_config(Path(config_folder(options.config)))


def recipe_of(options: argparse.Namespace) -> tuple[Recipe, DrafterGeometry]:
    """A recipe of the options; the drafter's geometry follows from the target's configuration."""
    config = text(options)
    depth = config.num_hidden_layers
    small = {"heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 2, "mask_token_id": 7}
    recipe = Recipe(
        name="bench",
        target=TargetConfig(
            model=str(config_folder(options.config)),
            layer_ids=taps(config, options.layers or (depth if depth <= 12 else None)),
            precision=options.precision,
        ),
        data=DataConfig("", "", budget=options.budget, max_document=options.budget),
        drafter=DrafterConfig(**(small if config.vocab_size < 100_000 else {})),
        train=TrainConfig(steps=10_000, anchors=options.anchors, rows_per_step=options.rows_per_step),
        topology=TopologyConfig(split=options.split, devices=options.devices),
    )
    return recipe, resolve(recipe)


def parse(argv: list[str] | None, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=description)
    parser.add_argument("--config", default="qwen3.5-27b", help="under bench/configs, or a model folder")
    parser.add_argument("--random-weights", action="store_true", help="needed: weights are not read here")
    parser.add_argument("--layers", type=int, help="only the target's first so many")
    parser.add_argument("--split", default="1:1", help="targets:drafters (1:1)")
    parser.add_argument("--devices", type=lambda names: tuple(names.split(",")), help="targets' first")
    parser.add_argument("--rows-per-step", type=int, help="default: one for each drafter")
    parser.add_argument("--budget", type=int, default=49152, help="tokens a row")
    parser.add_argument("--anchors", type=int, default=512, help="blocks a row")
    parser.add_argument("--documents", type=int, default=12, help="about so many a row, of varied lengths")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after two that settle")
    parser.add_argument("--precision", choices=("bf16", "fp8"), help="of the target's products")
    parser.add_argument("--losses", action="store_true", help="print that of every step, to compare splits")
    parser.add_argument("--trace", type=Path, help="keep the profiler's Chrome trace there")
    parser.add_argument("--results", type=Path, help="write rates and losses there, as JSON")
    parser.add_argument("--splits", action="store_true", help="try every split of the devices (all)")
    parser.add_argument("--no-fix", action="store_true", help="leave torch's tracing flag as it is")
    parser.add_argument(
        "--varied-steps", type=int, default=0, help="as many steps of a small target, none compiling"
    )
    parser.add_argument(
        "--races",
        type=int,
        default=0,
        help="as many starts without a warm-up, with the fix and without",
    )
    parser.add_argument("--small", action="store_true", help="every part of it, for a CPU's smoke test")
    options = parser.parse_args(argv)
    if options.splits:
        _both_roles(options, parser)
    if options.small or options.varied_steps or options.races:
        _small(options)
    elif not options.random_weights:
        parser.error("say --random-weights: this measures speed, no trained weights are read")
    if not Path(config_folder(options.config), "config.json").is_file():
        parser.error(f"--config {options.config}: no config.json in {config_folder(options.config)}")
    return options


def _small(options: argparse.Namespace) -> None:
    """The same program on a target and rows that take milliseconds."""
    on_gpu = torch.cuda.is_available()
    options.config = "hybrid-small" if on_gpu else "hybrid-tiny"
    options.random_weights = True
    options.layers = None
    options.budget, options.anchors, options.documents = (2048, 64, 6) if on_gpu else (256, 16, 3)
    options.steps = min(options.steps, 5)


def _both_roles(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """A target on every device but the last, a drafter on every one but the first, so that each split of
    them finds its parts there; as many rows a step in all of them."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = options.devices or tuple(gpus) or ("cpu",) * 3
    most = len(devices) - 1
    if most < 1:
        parser.error("--splits: one device has no other split; name more with --devices")
    options.devices = devices[:-1] + devices[1:]
    options.split = f"{most}:{most}"
    options.rows_per_step = options.rows_per_step or most
