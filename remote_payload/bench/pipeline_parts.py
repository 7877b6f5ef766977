"""What bench.pipeline puts in the place of a run's data and of a side that is left out, and its stopwatch."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.clock import ROW, Clock, Stamp
from trainer.data import Document, Row, pack
from trainer.handoff import own_stream, send
from trainer.seeding import generator

SUPERVISED = 0.7  # of each document, in two answers
LATE_AT_MOST_S = 0.02  # a longer gap is a wait for rows or for other drafters, not a late launch


class Rows:
    """Row `index`: about `documents` documents whose number, lengths and answers it alone decides."""

    def __init__(self, budget: int, documents: int, vocabulary: int) -> None:
        self._budget, self._documents, self._vocabulary = budget, documents, vocabulary

    def row(self, index: int) -> Row:
        draw = generator("bench", "row", index)
        count = int(torch.randint(max(1, self._documents // 2), 2 * self._documents, (), generator=draw))
        share = torch.rand(count, generator=draw) + 0.1
        lengths = (share / share.sum() * (self._budget - 8)).long().clamp(min=32).tolist()
        documents: list[Document] = []
        for number, length in enumerate(lengths):
            if sum(len(d.ids) for d in documents) + length > self._budget:
                break
            mask = torch.zeros(length, dtype=torch.bool)
            half, question = length // 2, max(1, int(length * (1 - SUPERVISED) / 2))
            mask[question:half] = mask[half + question :] = True
            ids = torch.randint(8, self._vocabulary, (length,), generator=draw)
            documents.append(Document(ids, mask, str(number)))
        return pack(documents, self._budget, index)


class Ready:
    """A target that has its features already: what is left of the pipeline is the drafters."""

    def __init__(self, device: torch.device, features: Tensor) -> None:
        self.device, self._features = device, features

    def features(self, row: Row) -> Tensor:
        return self._features


class Timed:
    """Seconds of work on one device, by its own events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.failure: BaseException | None = None

    def rows(self, features: Callable[[Row], Tensor], rows: Any, count: int, first: int, step: int) -> None:
        """Mean of `count` rows one after the other as a target's thread runs them, after one to begin
        with."""
        try:
            with own_stream(self.device):
                pace = Clock(self.device)
                began = None
                for number in range(count + 1):
                    row = rows.row(first + number * step)
                    pace.keep_pace()
                    if number == 1:
                        began = Stamp(self.device)
                    with pace.work(ROW):
                        send(row, features(row))
                ended = Stamp(self.device)
                ended.wait()
                assert began is not None
                self.seconds = began.seconds_until(ended) / count
        except BaseException as error:
            self.failure = error


@dataclass(frozen=True)
class Stream:
    """One stream under the profiler, from its first to its last kernel. `busy`, `late`: shares of it."""

    name: str
    kernels: int
    busy: float
    late: float


def lateness(run: Callable[[], None], keep: Path | None) -> list[Stream]:
    """Profile `run` and say of each busy stream how long it lay idle because its next launch came late."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return streams(events)


def streams(events: list[dict[str, Any]], at_least: int = 50) -> list[Stream]:
    """From a Chrome trace's events (times in microseconds); streams with fewer kernels are left out."""
    launched: dict[int, float] = {}
    by_stream: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for event in events:
        arguments = event.get("args") or {}
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in arguments:
            launched[arguments["correlation"]] = event["ts"] + event["dur"]
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            place = (arguments.get("device", 0), arguments.get("stream", 0))
            by_stream[place].append((event["ts"], event["dur"], arguments.get("correlation", -1)))
    found = []
    for (device, stream), kernels in sorted(by_stream.items()):
        if len(kernels) < at_least:
            continue
        kernels.sort()
        first, done = kernels[0][0], kernels[0][0]
        busy = late = 0.0
        for begin, took, correlation in kernels:
            gap = max(0.0, begin - done)
            if 0 < gap <= LATE_AT_MOST_S * 1e6:
                late += max(0.0, min(gap, launched.get(correlation, done) - done))
            busy += max(0.0, begin + took - max(done, begin))
            done = max(done, begin + took)
        span = done - first
        found.append(Stream(f"cuda:{device} stream {stream}", len(kernels), busy / span, late / span))
    return found


def small_config(options: argparse.Namespace) -> None:
    """The same program on a target and rows that take milliseconds."""
    on_gpu = torch.cuda.is_available()
    options.config = "hybrid-small" if on_gpu else "hybrid-tiny"
    options.random_weights = True
    options.layers = None
    options.budget, options.anchors, options.documents = (2048, 64, 6) if on_gpu else (256, 16, 3)
    options.steps = min(options.steps, 5)
