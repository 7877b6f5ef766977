"""May a run go on from a checkpoint? The trainer asks itself; the agent asks before it stops a run for it.

So the rule is known without torch: `python -m trainer.resumable RECIPE --checkpoint DIR` answers in one line
of JSON. What is damaged is no question of it: the trainer passes over that when it has compared all hashes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer import checksums
from trainer.config import Recipe, config_hash, lasting, load_recipe, recipe_of
from trainer.errors import Refusal

PROOF = "complete.json"  # of a checkpoint, written last: without it a folder is none


def identity(recipe: Recipe, release_dir: Path) -> dict[str, Any]:
    """What a checkpoint keeps of the training that made it, to be compared with a later one's: `config_hash`,
    `data_sha256`, and as `recipe` every value."""
    data = release_dir / recipe.data.train
    try:
        read = checksums.of(data.parent, [data.name])[data.name]
    except OSError as error:
        raise Refusal(f"{data}: cannot be read ({error.strerror})") from None
    return {
        "config_hash": config_hash(recipe),
        "data_sha256": read["sha256"][:16],
        "recipe": dataclasses.asdict(recipe),
    }


def config_of(path: Path) -> dict[str, Any]:
    """What `save` was given beside the tensors. Raises OSError, ValueError, TypeError where it is damaged."""
    return dict(json.loads((path / "config.json").read_text(encoding="utf-8")))


def refuse_another(path: Path, step: int, saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises Refusal where a run of `config` cannot go on from the checkpoint `path` of `saved` after `step`
    steps: other data, another recipe in what must last (config.lasting), or fewer steps than are done."""
    for name, theirs, ours in _differences(path, saved, config):
        raise Refusal(
            f"checkpoint {path} was made with {name} {theirs}, this run has {ours}: "
            "start with the same recipe, overrides and data, or without resume"
        )
    steps = config.get("recipe", {}).get("train", {}).get("steps", step)
    if step > steps:
        raise Refusal(
            f"checkpoint {path} has {step:,} steps, this run ends after {steps:,}: raise train.steps"
        )


def _differences(
    path: Path, saved: dict[str, Any], config: dict[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """(name, value there, value here) of what forbids to go on."""
    if saved.get("config_hash") != config["config_hash"]:
        try:
            values = (saved["recipe"], json.loads(json.dumps(config["recipe"])))
            theirs, ours = (lasting(recipe_of(each, path / "config.json")) for each in values)
        except (Refusal, KeyError, TypeError, AttributeError):  # of another schema
            yield "config_hash", saved.get("config_hash"), config["config_hash"]
            return
        for name in ours:
            if theirs[name] != ours[name]:
                yield name, theirs[name], ours[name]
    if saved.get("data_sha256") != config["data_sha256"]:
        yield "data_sha256", saved.get("data_sha256"), config["data_sha256"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.resumable",
        description="Say whether a run of this recipe may go on from a checkpoint; print one JSON line.",
    )
    parser.add_argument("recipe", help="a name under recipes/, or a YAML file")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--overrides", type=json.loads, default={}, help='JSON, e.g. {"train.steps": 50}')
    parser.add_argument("--release-dir", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args(argv)
    answer: dict[str, object] = {"ok": True}
    try:
        config = identity(load_recipe(args.recipe, args.release_dir, args.overrides), args.release_dir)
        found = _read(args.checkpoint)
    except Refusal as refusal:
        found, answer = None, {"ok": False, "error": str(refusal)}
    try:
        if found is not None:
            refuse_another(args.checkpoint, *found, config)
    except Refusal as refusal:
        answer = {"ok": False, "error": str(refusal), "hint": "--from-scratch begins anew"}
    print(json.dumps(answer))
    return 0 if answer["ok"] else 2


def _read(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Its steps and what made it; None where it is damaged."""
    try:
        proof = json.loads((path / PROOF).read_text(encoding="utf-8"))
        return int(proof["step"]), config_of(path)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


if __name__ == "__main__":
    sys.exit(main())
