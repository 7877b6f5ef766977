"""What a checkpoint costs a step, and what its hashes cost beside the training and at a resume.

`python -m bench.checkpoint --model /models/TARGET [--recipe NAME] [--folder DIR]` saves, seals and checks a
checkpoint of the recipe's drafter several times in a temporary folder below DIR.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.common import machine, say, table
from trainer import checkpoint
from trainer.config import load_recipe
from trainer.drafter import Drafter, initialise
from trainer.geometry import resolve
from trainer.optimizer import Optimizer

CONFIG = dict.fromkeys(("config_hash", "data_sha256"), "bench")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the target's folder; only its config.json is read")
    parser.add_argument("--recipe", default="smollm2-135m")
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; else the temporary one")
    parser.add_argument("--times", type=int, default=8)
    args = parser.parse_args(argv)
    release = Path(__file__).resolve().parent.parent
    recipe = load_recipe(args.recipe, release, {"target.model": str(Path(args.model).resolve())})
    drafter = Drafter(resolve(recipe))
    initialise(drafter, 0)
    optimizer = Optimizer(drafter, drafter.attach(torch.device("cpu"), torch.float32), recipe.train)
    optimizer.step(0, 1.0)
    seconds: dict[str, list[float]] = {"save": [], "seal": [], "check": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for step in range(1, args.times + 1):
            began = time.perf_counter()
            path = checkpoint.save(Path(folder), step, drafter, optimizer, CONFIG, keep=1)
            saved = time.perf_counter()
            checkpoint.seal(path)
            sealed = time.perf_counter()
            checkpoint.check(path, CONFIG)
            seconds["save"].append(saved - began)
            seconds["seal"].append(sealed - saved)
            seconds["check"].append(time.perf_counter() - sealed)
        mib = sum(each.stat().st_size for each in path.iterdir()) / 2**20
    say(f"{machine(torch.device('cpu'))}; {mib:,.0f} MiB, {args.times} times")
    rows = [[name, f"{statistics.median(took):.3f}", f"{min(took):.3f}"] for name, took in seconds.items()]
    table(["seconds", "median", "least"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
