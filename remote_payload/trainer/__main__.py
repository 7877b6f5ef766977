"""Start a run: `python -m trainer --run-dir DIR` under a supervisor, `--recipe NAME --run-dir DIR` by hand.

Exit codes: 0 finished or stopped, 2 an expected refusal (one line on stderr), anything else a crash.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from trainer import patient_log, tensorboard
from trainer.config import load_recipe
from trainer.errors import Refusal
from trainer.geometry import resolve
from trainer.leaving import leave
from trainer.tuning import keep_choices

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports a library that could ask a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
keep_choices()


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        order = _order(args)
        release_dir = Path(order["release_dir"])
        recipe = load_recipe(order["recipe"], release_dir, order["overrides"])
        resolve(recipe)  # a model folder that is not there is told in a second, before torch is imported
        if recipe.log.tensorboard:
            tensorboard.require()
        resume = Path(order["resume_from"]["path"]) if order.get("resume_from") else None
        return _train(recipe, release_dir, args.run_dir, resume, stop, order["allow_slow_kernels"])
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr, flush=True)
        return 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train a DFlash drafter.")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the run keeps its files")
    parser.add_argument("--recipe", help="a name under recipes/ or a YAML file; without it, run.json says")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. train.steps=50"
    )
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="continue from this folder")
    parser.add_argument(
        "--allow-slow-kernels", action="store_true", help="train although only reference kernels are there"
    )
    return parser.parse_args(argv)


def _order(args: argparse.Namespace) -> dict[str, Any]:
    """What to run: the agent's run.json, or the command line in the same words."""
    if args.recipe:
        return {
            "release_dir": Path(__file__).resolve().parent.parent,
            "recipe": args.recipe,
            "overrides": args.set,
            "resume_from": {"path": args.resume} if args.resume else None,
            "allow_slow_kernels": args.allow_slow_kernels,
        }
    path = args.run_dir / "run.json"
    try:
        order = json.loads(path.read_text(encoding="utf-8"))
        wanted = {name: order[name] for name in ("release_dir", "recipe", "overrides", "resume_from")}
        resume = wanted["resume_from"]
        words = (wanted["release_dir"], wanted["recipe"], resume["path"] if resume else "")
        if not all(isinstance(each, str) for each in words):
            raise TypeError("release_dir, recipe or resume_from.path is no text")
        if args.resume is not None:  # another attempt: from a checkpoint of its own
            wanted["resume_from"] = {"path": args.resume}
        return {
            **wanted,
            "allow_slow_kernels": bool(order.get("allow_slow_kernels")) or args.allow_slow_kernels,
        }
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror}): name a recipe with --recipe") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{path} is not a run's record: {error}") from None


def _train(
    recipe: Any,
    release_dir: Path,
    run_dir: Path,
    resume: Path | None,
    stop: threading.Event,
    allow_slow_kernels: bool,
) -> int:
    from trainer.record import RunRecord  # the first state appears before torch has been imported

    place_in_world = _place_in_world()
    if place_in_world[0] > 0:  # process 0 keeps the run's record, the others their own below it
        run_dir /= f"process-{place_in_world[0]}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        record = RunRecord(run_dir, recipe.train.steps)
        if place_in_world[0] > 0:  # the run's log would have every line twice; what fails is told there
            sys.stdout = patient_log.PatientStream(run_dir / "train.log")
    except OSError as error:
        raise Refusal(f"--run-dir {run_dir} cannot be written ({error.strerror})") from None
    try:
        from trainer.session import Session
        from trainer.world import NotMet, OthersGone

        session = Session(
            recipe, release_dir, record, stop, place_in_world, allow_slow_kernels=allow_slow_kernels
        )
        phase = session.run(resume)
        session.close()
        record.phase(phase)
        print(f"· {phase}", flush=True)
        return 0
    except Exception as error:
        cause = error.__cause__
        if isinstance(error, Refusal) or isinstance(cause, Refusal):
            record.note(f"refused: {cause or error}")
            raise (cause or error) from None
        if isinstance(error, NotMet):  # a thread waits for the others still, and cannot be told
            record.phase("stopped")
            record.close()
            leave(0, at_once=True)
        for gone in (error, cause):
            if isinstance(gone, OthersGone):
                record.note(str(gone))
                print(gone, file=sys.stderr, flush=True)
                return 1
        traceback.print_exception(error)
        record.note(str(error))
        return 1
    finally:
        record.close()


def _place_in_world() -> tuple[int, int]:
    """(rank, number of processes) as torchrun says, (0, 1) without it."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size != int(os.environ.get("LOCAL_WORLD_SIZE", size)):
        raise Refusal("torchrun over several machines is not supported: start all processes on one")
    return rank, size


if __name__ == "__main__":
    patient_log.install()
    leave(main())
