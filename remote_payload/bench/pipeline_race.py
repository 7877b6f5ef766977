"""Does a start without a warm-up survive? All threads compile while others run: many processes each way.

python -m bench.pipeline_race --devices cuda:0,cuda:1 [--no-fix]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.common import config_folder, say, table
from bench.pipeline_parts import Rows
from bench.random_target import build_random_target, taps, text_config
from trainer import fx_threads, islands
from trainer.config import DataConfig, DrafterConfig, Recipe, TargetConfig, TopologyConfig, TrainConfig
from trainer.geometry import resolve
from trainer.pipeline import Pipeline, ThreadFailed
from trainer.replica import Replica

STEPS = 8
TARGETS, DRAFTERS = 2, 3  # threads, over the devices in turn: more of them meet more often
PATIENCE_S = 240
CORES = 8  # for each start that runs at the same time: five threads and what compiles for them


def compare(processes: int, devices: list[str]) -> None:
    """Run `processes` starts with the fix and as many without it; print how each of them ended."""
    ends: dict[str, Counter[str]] = {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES)) as pool:
        for fix in ("with the fix", "without"):
            started = [pool.submit(_start, devices, fix == "without") for _ in range(processes)]
            ends[fix] = Counter(start.result() for start in started)
    rows = [(fix, seen.get("ok", 0), processes) for fix, seen in ends.items()]
    table(("", "survived", "of"), rows)
    say(f"goal: all with the fix, and no error there; without it {processes - rows[1][1]} ended in one")
    for fix, seen in ends.items():
        for end, count in seen.items():
            if end != "ok":
                say(f"{fix}: {count} x {end[:160]}")
    if ends["with the fix"].get("ok", 0) < processes:
        raise AssertionError("a start with the fix failed")


def _start(devices: list[str], without: bool) -> str:
    command = [sys.executable, "-m", "bench.pipeline_race", "--devices", ",".join(devices)]
    with tempfile.TemporaryDirectory() as caches:  # cold, so that compiles take as long as at a first start
        try:
            done = subprocess.run(
                command + ["--no-fix"] * without,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"hung for {PATIENCE_S} s"
    lines = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()
    return lines[-1]


def race(names: list[str]) -> str:
    """One start: nothing is warm, all threads compile what they need when they need it. How it ended."""
    devices = [torch.device(name) for name in names]
    on_gpu = devices[0].type == "cuda"
    folder = config_folder("hybrid-small" if on_gpu else "hybrid-tiny")
    config = text_config(Path(folder))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    recipe = Recipe(
        name="race",
        target=TargetConfig(model=str(folder), layer_ids=taps(config, config.num_hidden_layers)),
        data=DataConfig("", "", budget=1024 if on_gpu else 256, max_document=1024 if on_gpu else 256),
        drafter=DrafterConfig(layers=2, heads=4, kv_heads=2, head_dim=64, mask_token_id=7),
        train=TrainConfig(steps=STEPS, anchors=32 if on_gpu else 16),
        topology=TopologyConfig(split=f"{TARGETS}:{DRAFTERS}"),
    )
    geometry = resolve(recipe)
    places = [devices[n % len(devices)] for n in range(TARGETS + DRAFTERS)]
    built = {
        d: build_random_target(folder, d, dtype, layer_ids=geometry.target_layer_ids)
        for d in dict.fromkeys(places[:TARGETS])
    }
    rows = Rows(recipe.data.budget, 4, config.vocab_size)
    for target, _ in built.values():  # kernels that tune themselves must not do it in two threads
        target.features(rows.row(0))
    head = next(iter(built.values()))[1]
    replicas = [
        Replica(recipe, geometry, rank, device, head.to(device, dtype))
        for rank, device in enumerate(places[TARGETS:])
    ]
    for replica in replicas:  # each its own wrappers, as threads that know nothing of each other make them
        replica.drafter.islands = islands.compiled(replica.device)
    pipeline = Pipeline(
        recipe,
        rows,
        [built[d][0] for d in places[:TARGETS]],
        replicas,
        start_step=0,
        stop=threading.Event(),
        on_step=lambda result: None,
    )
    try:
        pipeline.run(lambda: None)
    except ThreadFailed as failed:
        return str(failed).splitlines()[0]
    return "ok"


def main(argv: list[str] | None = None) -> int:
    """Print how the start ended; 0 if it survived, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline_race", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--devices", required=True, help="separated by commas")
    parser.add_argument("--no-fix", action="store_true")
    options = parser.parse_args(argv)
    if not options.no_fix:
        fx_threads.install()
    fx_threads.set_dynamo_limits()
    end = race(options.devices.split(","))
    say(end)
    return 0 if end == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
