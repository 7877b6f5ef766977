"""May a run go on from a checkpoint? The trainer asks itself; the agent asks before it stops a run for it.

So the rule is known without torch: `python -m trainer.resumable RECIPE --checkpoint DIR` answers in one line
of JSON. What is damaged is no question of it: the trainer passes over that when it has compared all hashes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer import checksums
from trainer.config import Recipe, config_hash, lasting, load_recipe, recipe_of
from trainer.errors import Refusal

PROOF = "complete.json"  # of a checkpoint, written last: without it a folder is none
SETTLED_S = 2.0  # the coarsest clock of a file system ticks that slowly


def identity(recipe: Recipe, release_dir: Path, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a checkpoint keeps of the training that made it, to be compared with a later one's: `config_hash`,
    `data_sha256`, as `recipe` every value, and as `data_file` what tells the file that was hashed from any
    other: null where it could have been written to meanwhile.

    `known`: what an earlier call gave. Its hash, a second a GiB, is taken over for the very file that it is
    of."""
    data = release_dir / recipe.data.train
    try:
        file = _untouched(data)
        if known and file and known.get("data_file") == file and "data_sha256" in known:
            sha256 = known["data_sha256"]
        else:
            sha256 = checksums.of(data.parent, [data.name])[data.name]["sha256"][:16]
            file = file if file == _untouched(data) else None
    except OSError as error:
        raise Refusal(f"{data}: cannot be read ({error.strerror})") from None
    return {
        "config_hash": config_hash(recipe),
        "data_sha256": sha256,
        "data_file": file,
        "recipe": dataclasses.asdict(recipe),
    }


def _untouched(path: Path) -> dict[str, int] | None:
    """What changes with every write to `path` and every file put in its place: nobody can set a change time.
    None where that is too young: a second write within a tick of the file system's clock would not show."""
    found = path.stat()
    if found.st_ctime > time.time() - SETTLED_S:
        return None
    names = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    return {name: getattr(found, name) for name in names}


def config_of(path: Path) -> dict[str, Any]:
    """What `save` was given beside the tensors. Raises OSError, ValueError, TypeError where it is damaged."""
    found = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("config.json is no mapping")
    if not isinstance(found.get("metrics", {}), dict):
        raise ValueError("config.json: metrics are no mapping")
    starts = found.get("epoch_starts", [0])
    if starts[0] != 0 or any(later <= start for start, later in itertools.pairwise(starts)):
        raise ValueError("config.json: epoch_starts do not rise from row 0")
    return found


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
        found = _read(args.checkpoint)
        recipe = load_recipe(args.recipe, args.release_dir, args.overrides)
        config = identity(recipe, args.release_dir, found[1] if found else None)
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
