"""Does torch survive threads that compile while others run compiled code? Many processes, one verdict.

    python -m bench.fx_race --processes 200 --fix full
    python -m bench.fx_race --processes 40 --fix none

In each process threads run steps at several lengths, each of which compiles. A step has an eager block mask,
compiled flex_attention and a compiled model, forward and backward; results and gradients must equal eager.
  default         compiles overlap compiled calls. Without the fix it fails on torch up to 2.12.
  dense-fallback  the recompile limit is low: past it flex_attention traces unlocked each time. Fails on all.
  make-fx         each step also calls make_fx, which traces unlocked. Fails on all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.context
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE_S = 300.0  # for a process that takes 4 to 20 s
EXIT_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Print one line and return 0 if no step failed, 1 if one did, 2 for bad arguments, 130 for Ctrl-C."""
    options = _parse(argv)
    began = time.monotonic()
    try:
        outcomes = _run_all(options)
    except KeyboardInterrupt:
        print("interrupted: no verdict", file=sys.stderr)
        return 130
    summary = _summarise(options, outcomes, time.monotonic() - began)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"summary": summary, "processes": outcomes}, file, indent=1)
    print(_line(summary))
    return 1 if summary["failed_processes"] else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fx_race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=_positive, default=20, metavar="N", help="how many (default 20)")
    parser.add_argument(
        "--fix", choices=("full", "none"), default="full", help="trainer/fx_threads.py, or nothing"
    )
    parser.add_argument(
        "--scenario", choices=("default", "dense-fallback", "make-fx"), default="dense-fallback"
    )
    parser.add_argument("--backend", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument(
        "--threads", type=_positive, default=3, metavar="N", help="in each process (default 3)"
    )
    parser.add_argument(
        "--lengths", type=_positive, default=4, metavar="N", help="in each process (default 4)"
    )
    parser.add_argument(
        "--steps", type=_positive, default=12, metavar="N", help="of each thread (default 12)"
    )
    found = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=found, help=f"default here: {found}")
    parser.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="processes at a time (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write summary and each process there")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _context(device: str) -> multiprocessing.context.BaseContext:
    """On the CPU one process imports torch and each of ours begins as its copy; CUDA allows no copies."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.fx_race_steps"])
    return context


def _run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    context = _context(options.device)
    outcomes: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(_run_one, context, options, number) for number in range(options.processes)]
        try:
            for done in as_completed(waiting):
                outcomes.append(done.result())
                failed = sum(bool(outcome["errors"]) for outcome in outcomes)
                if len(outcomes) % 10 == 0:
                    print(
                        f"{len(outcomes)} of {options.processes} processes, {failed} failed", file=sys.stderr
                    )
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcomes


def _run_one(context: Any, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """One fresh process and its outcome as a dictionary; one that dies or hangs has an error too."""
    plan = {
        name: getattr(options, name)
        for name in ("scenario", "fix", "backend", "threads", "steps", "lengths", "device")
    }
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(writer, {**plan, "seed": options.seed + number}))
    process.start()
    writer.close()
    try:
        if not reader.poll(PATIENCE_S):
            return {"errors": {f"process hung for {PATIENCE_S:.0f} s": 1}}
        return reader.recv()
    except EOFError:
        process.join()
        return {"errors": {f"process died with exit code {process.exitcode}": 1}}
    finally:
        reader.close()
        process.join(EXIT_S)
        process.kill()
        process.join()


def _child(writer: Connection, plan: dict[str, Any]) -> None:
    from bench import fx_race_steps  # torch belongs to the children: this process stays small

    outcome = fx_race_steps.run(fx_race_steps.Plan(**plan))
    writer.send(asdict(outcome))
    writer.close()


def _summarise(options: argparse.Namespace, outcomes: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    for outcome in outcomes:
        kinds.update(outcome["errors"])
    whole = [outcome for outcome in outcomes if "steps" in outcome]
    return {
        "processes": len(outcomes),
        "failed_processes": sum(
            bool(outcome["errors"]) or outcome.get("stuck", False) for outcome in outcomes
        ),
        "steps": sum(outcome["steps"] for outcome in whole),
        "failed_steps": sum(outcome["failed_steps"] for outcome in whole),
        "stuck_processes": sum(outcome["stuck"] for outcome in whole),
        "difference": max((outcome["difference"] for outcome in whole), default=None),
        "graphs": sum(outcome["graphs"] for outcome in whole),
        "kinds": dict(kinds.most_common()),
        "seconds": round(seconds, 1),
        "torch": whole[0]["torch"] if whole else None,
        "torch_device": whole[0]["device"] if whole else None,
        "options": {key: value for key, value in vars(options).items() if key != "json"},
    }


def _line(summary: dict[str, Any]) -> str:
    options = summary["options"]
    failed = summary["failed_processes"]
    text = (
        f"{'FAILED' if failed else 'OK'}: {failed} of {summary['processes']} processes and "
        f"{summary['failed_steps']} of {summary['steps']} steps had errors"
    )
    if summary["stuck_processes"]:
        text += f", {summary['stuck_processes']} processes could never call compiled code again"
    if summary["kinds"]:
        text += " (" + "; ".join(f"{count} x {kind}" for kind, count in summary["kinds"].items()) + ")"
    if summary["difference"] is not None:
        text += f"; largest difference to eager {summary['difference']:.1e}"
    return (
        f"{text}; fix {options['fix']}, {options['scenario']}, {options['backend']}, {options['threads']} "
        f"threads x {options['steps']} steps, {options['lengths']} lengths, {summary['graphs']} graphs, "
        f"torch {summary['torch']} on {summary['torch_device']}, {summary['seconds']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
