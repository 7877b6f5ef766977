"""What a recipe asks for, in one line of JSON without torch: the agent asks before it starts a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from trainer import tensorboard
from trainer.config import config_hash, load_recipe
from trainer.errors import Refusal
from trainer.geometry import is_hybrid, resolve, target_text_config

FP32_WITH_MOMENTS = 12  # bytes a parameter in a checkpoint: master weight and two Adam moments


def describe(recipe: str, release_dir: Path, overrides: object) -> dict[str, object]:
    """What the one who starts a run must know; `checkpoint_bytes` is None when the model cannot be read."""
    loaded = load_recipe(recipe, release_dir, overrides)
    if loaded.log.tensorboard:
        tensorboard.require()
    answer: dict[str, object] = {
        "ok": True,
        "name": loaded.name,
        "config_hash": config_hash(loaded),
        "model": loaded.target.model,
        "steps": loaded.train.steps,
        "checkpoint_bytes": None,
        "budget": loaded.data.budget,
        "hybrid": False,
        "values": dataclasses.asdict(loaded),
    }
    if (Path(loaded.target.model) / "config.json").is_file():
        geometry = resolve(loaded)
        answer["hybrid"] = is_hybrid(target_text_config(loaded.target.model))
        answer["checkpoint_bytes"] = FP32_WITH_MOMENTS * geometry.parameter_count()
    return answer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.describe", description="Check a recipe; print one JSON line."
    )
    parser.add_argument("recipe", help="a name under recipes/, or a YAML file")
    parser.add_argument("--overrides", default="{}", help='JSON, e.g. {"train.steps": 50}')
    parser.add_argument("--release-dir", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args(argv)
    try:
        try:
            overrides = json.loads(args.overrides)
        except ValueError as error:
            raise Refusal(f'--overrides is not JSON ({error}): write {{"train.steps": 50}}') from None
        answer = describe(args.recipe, args.release_dir, overrides)
    except Refusal as refusal:
        answer = {"ok": False, "error": str(refusal)}
    print(json.dumps(answer))
    return 0 if answer["ok"] else 2


if __name__ == "__main__":
    sys.exit(main())
