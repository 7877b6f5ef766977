"""What a run measured of itself, over its whole length: every evaluation, and curves of a bounded size."""

from __future__ import annotations

import json
import mmap
import os
from typing import Iterator

from agent import shapes
from agent.call import Json
from agent.files import number, read_json

MAX_POINTS = 2000


def path(run_dir: str) -> str:
    return os.path.join(run_dir, "metrics.jsonl")


def evaluations(run_dir: str) -> list[Json]:
    """Every τ as `{step, time, tau}`, by step; the file is searched, not parsed.

    The evaluation at the very end stands only in `state.json`.
    """
    found: list[Json] = []
    try:
        with open(path(run_dir), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            at = text.find(b'"tau"')
            while at >= 0:
                begin, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
                if end < 0:
                    break  # the line is still being written
                line = _line(text[begin:end])
                if line is not None and line.get("tau") is not None:
                    found.append({"step": line["step"], "time": line.get("time"), "tau": line["tau"]})
                at = text.find(b'"tau"', end)
    except (OSError, ValueError):
        pass  # none yet, or empty
    state = shapes.sound(read_json(os.path.join(run_dir, "state.json")), shapes.STATE) or {}
    step, tau = number(state, "step"), number(state, "tau")
    if (
        state.get("phase") == "finished"
        and step is not None
        and tau is not None
        and (not found or found[-1]["step"] != step)
    ):
        found.append({"step": step, "time": number(state, "heartbeat"), "tau": tau})
    return found


def curves(run_dir: str, points: int) -> Json:
    """Columns of at most `points` rows: `steps times loss tokens_per_s step_s busy{thread: shares}`.

    A row stands for equally many lines: its loss and shares are their means, its rate comes from their steady
    steps only (None where there is none), its step and time are those of its last line. `first` is the step
    of the first line, which may lie far from 1: a resumed run has its own lines alone.
    """
    lines = list(_lines(path(run_dir)))
    width = -(-len(lines) // max(1, min(points, MAX_POINTS))) or 1
    rows = [_row(lines[at : at + width]) for at in range(0, len(lines), width)]
    threads = sorted({name for row in rows for name in row["busy"]})
    return {
        "lines": len(lines),
        "first": lines[0]["step"] if lines else None,
        "steps": [row["step"] for row in rows],
        "times": [row["time"] for row in rows],
        "loss": [row["loss"] for row in rows],
        "tokens_per_s": [row["tokens_per_s"] for row in rows],
        "step_s": [row["step_s"] for row in rows],
        "busy": {name: [row["busy"].get(name) for row in rows] for name in threads},
    }


def _row(lines: list[Json]) -> Json:
    steady = [line for line in lines if not line.get("compile") and line.get("step_s")]
    seconds = sum(line["step_s"] for line in steady)
    tokens = sum(line.get("tokens") or 0 for line in steady)
    shares: dict[str, list[float]] = {}
    for line in lines:
        busy = line.get("busy")
        for name, share in busy.items() if isinstance(busy, dict) else ():
            if isinstance(share, (int, float)):
                shares.setdefault(name, []).append(share)
    return {
        "step": lines[-1]["step"],
        "time": lines[-1].get("time"),
        "loss": _mean([line["loss"] for line in lines if line.get("loss") is not None]),
        "tokens_per_s": round(tokens / seconds, 3) if steady else None,
        "step_s": round(seconds / len(steady), 4) if steady else None,
        "busy": {name: _mean(values) for name, values in shares.items()},
    }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def _lines(name: str) -> Iterator[Json]:
    try:
        with open(name, "rb") as file:
            for raw in file:
                line = _line(raw)
                if line is not None:
                    yield line
    except OSError:
        return


def _line(raw: bytes) -> Json | None:
    """One step's line without what is not of its kind; None when it is damaged or names no step."""
    try:
        line = shapes.sound(json.loads(raw), shapes.METRICS)
    except (ValueError, RecursionError):
        return None
    return line if line is not None and line.get("step") is not None else None
