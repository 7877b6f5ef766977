"""A recipe is all that a run trains with: one YAML file, checked and hashed without importing torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import Refusal
from trainer.recipe_file import Tree, build, parse_overrides, read_tree


@dataclass(frozen=True)
class TargetConfig:
    """The frozen language model. `layer_ids` None: the paper's formula with `taps` layers (see
    geometry.py). `precision` None: products in `dtype`; fp8: scaled 8-bit ones."""

    model: str
    taps: int = 5
    layer_ids: tuple[int, ...] | None = None
    dtype: str = "auto"
    precision: str | None = None


@dataclass(frozen=True)
class DrafterConfig:
    """Geometry of the drafter; it is its own, not the target's. None: the target's value, or the rule in
    geometry.py. `init: target` starts from the target's last layers (see warm_start.py)."""

    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int | None = None
    block_size: int = 16
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    mask_token_id: int | None = None
    rope_theta: float | None = None
    init: str = "random"


@dataclass(frozen=True)
class DataConfig:
    """Conversations as jsonl or as trainer.prepare made them, relative to the release; `budget` tokens a
    row; documents are cut at `max_document`."""

    train: str
    heldout: str
    budget: int = 32768
    max_document: int = 4096
    min_supervised: int = 16


@dataclass(frozen=True)
class TrainConfig:
    """The step. `rows_per_step` rows each, whatever the number of drafters; None: as many as the recipe names
    drafters. `anchors` blocks a row, shared out over its documents, at most `anchors_per_document` each;
    `gamma` as in the paper (7 for block 16, 5 for 10, 4 for 8); `activation_checkpointing` trades a
    third more work for memory."""

    steps: int
    rows_per_step: int | None = None
    lr: float = 6e-4
    warmup_share: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    anchors: int = 512
    anchors_per_document: int | None = None
    gamma: float = 7.0
    beta2: float = 0.999
    loss_chunk_blocks: int = 128
    activation_checkpointing: bool = False
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    eval_every: int = 500
    eval_documents: int = 32


@dataclass(frozen=True)
class TopologyConfig:
    """Where a run computes; nothing of it changes what is learnt. `split` is T:D (targets:drafters), or auto:
    what the arithmetic of both sides suggests for the devices there are (topology.py); `targets` and
    `drafters` say the same apart. `devices` names the targets' devices first, then the drafters'; None: the
    GPUs in turn, without any the CPU."""

    split: str = "auto"
    targets: int | None = None
    drafters: int | None = None
    devices: tuple[str, ...] | None = None
    queue_rows: int = 2
    cpu_threads: int = 1

    @property
    def named(self) -> tuple[int, int] | None:
        """(targets, drafters) as the recipe says, or None where the machine decides."""
        if self.targets or self.drafters:
            return self.targets or 1, self.drafters or 1
        numbers = _SPLIT.fullmatch(self.split)
        return (int(numbers[1]), int(numbers[2])) if numbers else None


_SPLIT = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")


@dataclass(frozen=True)
class LogConfig:
    """What a run writes beside metrics.jsonl. `tensorboard`: an events file in RUN/tensorboard."""

    tensorboard: bool = False


@dataclass(frozen=True)
class Recipe:
    name: str
    target: TargetConfig
    data: DataConfig
    train: TrainConfig
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    log: LogConfig = field(default_factory=LogConfig)
    compile: str = "auto"

    @property
    def rows_per_step(self) -> int:
        """Rows in one optimizer step; it never depends on the machine."""
        named = self.topology.named
        return self.train.rows_per_step or (named[1] if named else 1)


# These change cadence and speed, never the trajectory. `train.steps` is in the hash because the cosine ends
# there; of the topology only the rows that its drafters make of a step, without a train.rows_per_step.
_OUTSIDE_THE_HASH = {
    ("name",),
    ("compile",),
    ("train", "checkpoint_every"),
    ("train", "keep_checkpoints"),
    ("train", "eval_every"),
    ("train", "eval_documents"),
    ("train", "loss_chunk_blocks"),
    ("train", "activation_checkpointing"),
    ("topology",),
    ("log",),
}
# Only the steps to come follow these, so a run that was told which one to go on from may change them: what
# was learnt, its moments and the order of the rows stay. The seed and the rows of a step make that order.
_OF_STEPS_TO_COME = {
    ("train", f.name) for f in dataclasses.fields(TrainConfig) if f.name not in ("seed", "rows_per_step")
} | {("drafter", "init")}


def config_hash(recipe: Recipe) -> str:
    """16 hex digits over everything that changes the training trajectory."""
    text = json.dumps(_without(recipe, _OUTSIDE_THE_HASH), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lasting(recipe: Recipe) -> dict[str, Any]:
    """What a run must share with the checkpoint that it goes on from: `drafter.layers` and the like."""
    kept = _without(recipe, _OUTSIDE_THE_HASH | _OF_STEPS_TO_COME)
    sections = {section: values for section, values in kept.items() if isinstance(values, dict)}
    return {
        f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()
    }


def _without(recipe: Recipe, left_out: set[tuple[str, ...]]) -> dict[str, Any]:
    def keep(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
        return {
            key: keep(value, (*path, key)) if isinstance(value, dict) else value
            for key, value in tree.items()
            if (*path, key) not in left_out
        }

    kept = keep(dataclasses.asdict(recipe))
    kept["train"]["rows_per_step"] = recipe.rows_per_step
    return kept


def recipe_of(values: dict[str, Any], path: Path) -> Recipe:
    """The recipe whose values were written down in `path`; what came to the schema since has its default.

    Raises Refusal where they are no recipe's."""
    loaded: Recipe = build(Recipe, Tree(path, values, {}))
    return loaded


def recipe_path(recipe: str, release_dir: Path) -> Path:
    """`recipe` is a name under `<release>/recipes/` or a path to a YAML file."""
    if recipe.endswith((".yaml", ".yml")):
        return Path(recipe)
    folder = release_dir / "recipes"
    path = folder / f"{recipe}.yaml"
    try:
        there = path.is_file()
    except OSError:  # a name that no file can have
        there = False
    if not there:
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        raise Refusal(f"no recipe {recipe!r} in {folder}; there are: {known}")
    return path


_LARGEST = 2**31 - 1  # positions are int32
_LARGEST_OF = {
    "train.seed": 2**63 - 1,  # int64
    "drafter.layers": 1000,  # a list as long is made of each
    "target.taps": 1000,
    "topology.targets": 256,  # a thread each
    "topology.drafters": 256,
    "topology.cpu_threads": 1024,  # beyond the machine's own OpenMP ends the process without a word
}
_FP32 = (1e-37, 3e38)  # what products and moments are reckoned in: beyond, a value is 0 or infinite there


def load_recipe(recipe: str, release_dir: Path, overrides: object = None) -> Recipe:
    """Read, override and check a recipe; `overrides` is {"train.steps": 50} or ["train.steps=50"].

    Raises Refusal with `file:line`, the key and the mend.
    """
    path = recipe_path(recipe, release_dir)
    tree = read_tree(path)
    for key, value in parse_overrides(overrides).items():
        tree.override(key, value)
    loaded = build(Recipe, tree, defaults={"name": path.stem})
    problem = next(_problems(loaded), None)
    if problem is not None:
        key, text = problem
        raise Refusal(f"{tree.where(key)}: {key} {text}")
    return loaded


def _problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    drafter, data, train, topology = recipe.drafter, recipe.data, recipe.train, recipe.topology
    for section, values, zero_allowed in (
        ("drafter", drafter, ()),
        ("data", data, ()),
        (
            "train",
            train,
            ("warmup_share", "weight_decay", "seed", "checkpoint_every", "eval_every", "eval_documents"),
        ),
        ("topology", topology, ()),
        ("target", recipe.target, ()),
    ):
        for name, value in dataclasses.asdict(values).items():
            key = f"{section}.{name}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            largest = _LARGEST_OF.get(key, _LARGEST)
            if isinstance(value, int) and value > largest:
                yield key, f"is too large: {largest:,} is the most"
            elif not math.isfinite(value):
                yield key, f"is {value}: write a finite number"
            elif value < 0 or (value == 0 and name not in zero_allowed):
                yield key, f"is {value}: it must be {'0 or more' if name in zero_allowed else 'above 0'}"
            elif isinstance(value, float) and value and not _FP32[0] <= value <= _FP32[1]:
                yield key, f"is {value}, which 32 bits do not hold: write a number that trains"
    if recipe.compile not in ("auto", "on", "off"):
        yield "compile", f"is {recipe.compile!r}: choose auto, on or off"
    if recipe.target.dtype not in ("auto", "float32", "bfloat16"):
        yield "target.dtype", f"is {recipe.target.dtype!r}: choose auto, float32 or bfloat16"
    if recipe.target.precision not in (None, "bf16", "fp8"):
        yield "target.precision", f"is {recipe.target.precision!r}: choose bf16 or fp8, or leave it out"
    if drafter.init not in ("random", "target"):
        yield "drafter.init", f"is {drafter.init!r}: choose random or target (its last layers)"
    if drafter.block_size < 2:
        yield (
            "drafter.block_size",
            f"is {drafter.block_size}: a block holds its anchor and at least one draft slot",
        )
    if drafter.heads % drafter.kv_heads:
        yield "drafter.heads", f"is {drafter.heads}: it must be a multiple of kv_heads {drafter.kv_heads}"
    if drafter.head_dim % 2:
        yield "drafter.head_dim", f"is {drafter.head_dim}: rotary positions need an even number"
    types = drafter.layer_types
    if types is not None and len(types) != drafter.layers:
        yield (
            "drafter.layer_types",
            f"names {len(types)} layers, drafter.layers is {drafter.layers}: make them agree",
        )
    if types is not None and (odd := set(types) - {"full_attention", "sliding_attention"}):
        yield "drafter.layer_types", f"has {sorted(odd)}: choose full_attention or sliding_attention"
    if types is not None and "sliding_attention" in types and drafter.sliding_window is None:
        yield "drafter.sliding_window", "is missing: a sliding_attention layer needs it"
    if data.max_document > data.budget:
        yield (
            "data.max_document",
            f"is {data.max_document}, above data.budget {data.budget}: a document must fit a row",
        )
    if data.max_document <= drafter.block_size:
        yield (
            "data.max_document",
            f"is {data.max_document}: it must exceed drafter.block_size {drafter.block_size}",
        )
    if train.warmup_share > 1:
        yield "train.warmup_share", f"is {train.warmup_share}: it is a share of the steps, at most 1"
    if train.beta2 >= 1:
        yield "train.beta2", f"is {train.beta2}: it is a decay, below 1"
    yield from _topology_problems(topology)


def _topology_problems(topology: TopologyConfig) -> Iterator[tuple[str, str]]:
    if topology.split != "auto" and _SPLIT.fullmatch(topology.split) is None:
        yield "topology.split", f"is {topology.split!r}: write targets:drafters such as 5:3, or auto"
    elif topology.split != "auto" and (topology.targets or topology.drafters):
        yield "topology.split", "stands beside topology.targets or topology.drafters: keep one way to say it"
    named, devices = topology.named, topology.devices
    for side, count in zip(("targets", "drafters"), named or (), strict=False):
        if count > (most := _LARGEST_OF[f"topology.{side}"]):
            yield "topology.split", f"names {count:,} {side}: {most} are the most"
    if devices is not None and named is None:
        yield "topology.devices", "needs topology.split: write how many of them are targets, e.g. 5:3"
    elif devices is not None and named is not None and len(devices) % sum(named):
        yield (
            "topology.devices",
            f"names {len(devices)} devices: name {sum(named)}, targets first, then drafters",
        )
