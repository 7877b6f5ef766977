"""What this configuration once reached on this hardware: without it nobody sees that a run became slow.

One file per (configuration hash, GPU models and their count, versions) beside the runs, so that all
operators share it and it outlives pruned runs. The supervisor writes it. Without a GPU there is none: a CPU's
speed tells more about its other users than about the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time

from agent import shapes
from agent.call import Json
from agent.files import read_json, tail_objects, write_json

WINDOW = 50  # steady steps whose median rate is one measurement
KEEP = 10  # runs that a file remembers
EVERY_S = 60.0
_BETTER = 1.01  # a measurement must beat the run's best by this factor to be written
_TAIL = 2 * WINDOW  # metrics lines: room for some that compiled
_ENTRY = {"run": str, "at": float, "tokens_per_s": float, "split": str, "driver": str, "release": str}


def path(run_dir: str, record: Json | None) -> str | None:
    """The file of this run's kind; None when its record does not say all of it, or it has no GPU."""
    record = record or {}
    gpus = (record.get("gpus") or {}).get("names")
    kind = [record.get("config_hash"), gpus, record.get("versions")]
    if not all(kind):
        return None
    key = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:16]
    return os.path.join(os.path.dirname(os.path.dirname(run_dir)), "baselines", f"{key}.json")


def best(run_dir: str, record: Json | None) -> Json | None:
    """The fastest of the remembered runs, and in `runs` how many these are; the run itself is one of them."""
    place = path(run_dir, record)
    entries = _entries(place) if place else []
    if not entries:
        return None
    return {**max(entries, key=lambda each: each["tokens_per_s"]), "runs": len(entries)}


def median_rate(run_dir: str) -> float | None:
    """Median over the last WINDOW steady steps of tokens per second; None while there are fewer.

    A run's first step fills its queues and is not steady.
    """
    lines = [
        shapes.sound(line, shapes.METRICS)
        for line in tail_objects(os.path.join(run_dir, "metrics.jsonl"), _TAIL)
    ]
    steady = [line for line in lines if line.get("step_s") and line.get("tokens") and not line.get("compile")]
    if len(steady) <= WINDOW:
        return None
    rate: float = statistics.median(line["tokens"] / line["step_s"] for line in steady[-WINDOW:])
    return rate


class Keeper:
    """Writes down the best that one run reached. A disk that is full costs only that."""

    def __init__(self, run_dir: str, record: Json) -> None:
        self.run_dir, self.record = run_dir, record
        self.path = path(run_dir, record)
        self.reached, self.at = 0.0, time.monotonic()

    def due(self) -> bool:
        return self.path is not None and time.monotonic() - self.at >= EVERY_S

    def note(self) -> None:
        self.at = time.monotonic()
        rate = median_rate(self.run_dir) if self.path else None
        if self.path is None or rate is None or rate <= self.reached * _BETTER:
            return
        self.reached = rate
        state = shapes.sound(read_json(os.path.join(self.run_dir, "state.json")), shapes.STATE) or {}
        entry = {
            "run": self.record.get("id"),
            "at": time.time(),
            "tokens_per_s": round(rate, 1),
            "split": (state.get("pipeline") or {}).get("split"),
            "driver": (self.record.get("gpus") or {}).get("driver"),
            "release": self.record.get("release"),
        }
        others = [each for each in _entries(self.path) if each["run"] != entry["run"]]
        kind = {name: self.record.get(name) for name in ("recipe", "config_hash", "versions")}
        kind["gpus"] = self.record["gpus"]["names"]
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            write_json(self.path, {"schema": 1, **kind, "runs": [*others, entry][-KEEP:]})
        except OSError:
            pass


def _entries(place: str) -> list[Json]:
    found = (read_json(place) or {}).get("runs")
    entries = [shapes.sound(each, _ENTRY) for each in found] if isinstance(found, list) else []
    return [each for each in entries if each and each.get("tokens_per_s") and each.get("run")]
