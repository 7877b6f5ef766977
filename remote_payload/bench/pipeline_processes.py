"""Do two processes, each with T:D, take the steps of one process with 2T:2D? Losses and rates of both.

    python -m bench.pipeline_processes --devices cuda:0,cuda:1,cuda:2,cuda:3 --steps 200
    python -m bench.pipeline_processes --devices cuda:0,cuda:1,cuda:0,cuda:1 --steps 200     # two cards
    python -m bench.pipeline_processes --devices cpu,cpu,cpu,cpu --steps 20

The devices are those of the one process, its targets first; half of each side goes to either of the two. All
run the small target of bench.pipeline, which also says of each whether anything compiled after the warm-up
and whether the weights of all drafters are the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import concluded, say, section, table

NOISE = 0.01  # of a loss: sums of bf16 products in another order; in fp32 on a CPU 1e-5 is seen
PATIENCE_S = 500
PROCESSES = 2
PAYLOAD = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Print both, 0 if the curves are one, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline_processes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--devices", required=True, help="an even number of targets' and of drafters' devices"
    )
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)
    devices = options.devices.split(",")
    if len(devices) % (2 * PROCESSES):
        parser.error("--devices: two for each of two processes, or a multiple: the targets' first")

    def run() -> list[str]:
        failures: list[str] = []
        with section("one process and two", failures):
            compare(devices, options.steps)
        return failures

    return concluded(run)


def compare(devices: list[str], steps: int) -> None:
    """Raises AssertionError if a run failed or the losses are not the same within NOISE."""
    side = len(devices) // 2
    with tempfile.TemporaryDirectory() as folder:
        one = _run(Path(folder, "one.json"), [], devices, side, steps, rows=side)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        two = _run(
            Path(folder, "two.json"), launcher, shared_out(devices), side // PROCESSES, steps, rows=side
        )
    losses = [told["losses"]["varied"] for told in (one, two)]
    apart = [abs(b - a) / abs(a) for a, b in zip(*losses, strict=True)]
    shown = sorted({0, steps // 4, steps // 2, steps - 1})
    table(
        ("step", "loss of one", "of two"),
        [(step + 1, f"{losses[0][step]:.6f}", f"{losses[1][step]:.6f}") for step in shown],
    )
    rates = [told["rates"]["varied"] for told in (one, two)]
    say(f"one process {rates[0]:,.0f} tok/s, two {rates[1]:,.0f}")
    say(f"losses differ by {max(apart):.1e} at most, at the end by {apart[-1]:.1e}; goal ≤ {NOISE:.0%}")
    if max(apart) > NOISE:
        raise AssertionError(f"step {apart.index(max(apart)) + 1}: the losses differ by {max(apart):.1%}")


def shared_out(devices: list[str]) -> list[str]:
    """Targets first and then drafters, of one process -> the same for each of the processes in turn."""
    side = len(devices) // 2
    share = side // PROCESSES
    return [
        device
        for process in range(PROCESSES)
        for first in (process * share, side + process * share)
        for device in devices[first : first + share]
    ]


def _run(
    results: Path, launcher: list[str], devices: list[str], side: int, steps: int, rows: int
) -> dict[str, Any]:
    command = [sys.executable, *launcher, "-m", "bench.pipeline", "--varied-steps", str(steps)]
    command += ["--split", f"{side}:{side}", "--devices", ",".join(devices), "--rows-per-step", str(rows)]
    say("$ " + " ".join(command[1:]))
    done = subprocess.run(
        [*command, "--results", str(results)],
        cwd=PAYLOAD,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if line.strip()]
    say("\n".join(f"  {line}" for line in (told[-12:] if done.returncode == 0 else told[-60:])))
    if done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
