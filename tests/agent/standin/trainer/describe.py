"""Whoever starts a run asks here what the recipe says, in one line of JSON."""

import argparse
import hashlib
import json
from pathlib import Path

VERSION = 1
LASTS = ("seed", "data")  # what a run shares with the checkpoint that it goes on from; `data`: their content
OUTSIDE_THE_HASH = ("behave", "step_s", "deaths", "proof", "proof_code", "data")


def load(recipe, overrides):
    path = Path(recipe) if recipe.endswith(".yaml") else Path("recipes") / f"{recipe}.yaml"
    return {**json.loads(path.read_text()), **overrides}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--overrides", default="{}")
    args = parser.parse_args()
    values = load(args.recipe, json.loads(args.overrides))
    if values["steps"] < 1:
        print(json.dumps({"ok": False, "error": "recipes/tiny.yaml:1: steps must be 1 or more"}))
        return
    hashed = {key: value for key, value in values.items() if key not in OUTSIDE_THE_HASH}
    answer = {
        "ok": True,
        "name": args.recipe,
        "config_hash": hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16],
        "model": values["model"],
        "steps": values["steps"],
        "checkpoint_bytes": values.get("checkpoint_bytes", 100),
        "budget": 64,
        "hybrid": "proof" in values,
        "values": {"data": values.get("corpus", {})},
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
