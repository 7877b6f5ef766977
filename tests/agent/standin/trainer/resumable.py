"""Whoever starts a run asks here whether it may go on from a checkpoint, in one line of JSON."""

import argparse
import json
from pathlib import Path

from trainer.describe import LASTS, load


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--overrides", default="{}")
    args = parser.parse_args()
    values = load(args.recipe, json.loads(args.overrides))
    made_with = json.loads((args.checkpoint / "complete.json").read_text())["made_with"]
    answer = {"ok": True}
    for name in LASTS:
        if made_with[name] != values.get(name):
            words = f"step {args.checkpoint.name} was made with {name} {made_with[name]}"
            words += f", this run has {values.get(name)}"
            answer = {"ok": False, "error": words, "hint": "--from-scratch begins anew"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
