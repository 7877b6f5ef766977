"""What the profiler's trace tells of a pipeline: streams that Python left dry, copies that cards hide."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LATE_AT_MOST_S = 0.02  # a longer gap is a wait for rows or for other drafters, not a late launch

Event = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Stream:
    """One stream under the profiler, from its first to its last kernel. `busy`, `late`: shares of it."""

    name: str
    kernels: int
    busy: float
    late: float


@dataclass(frozen=True)
class Crossing:
    """The copies from one card to another. `beside_source`, `beside_drain`: share of their time in which
    kernels ran on that card, so that its work did not wait for the copy; `share`: of the profiled time."""

    way: str
    copies: int
    size: int
    seconds: float
    beside_source: float
    beside_drain: float
    share: float


def profiled(run: Callable[[], None], keep: Path | None) -> list[Event]:
    """The Chrome trace's events of `run`, times in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder, "trace.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def streams(events: list[Event], at_least: int = 50) -> list[Stream]:
    """How long each stream lay idle because its next launch came late; those with fewer kernels left out."""
    launched: dict[int, float] = {}
    by_stream: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for event in events:
        arguments = event.get("args") or {}
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in arguments:
            launched[arguments["correlation"]] = event["ts"] + event["dur"]
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            place = (_device(event), arguments.get("stream", 0))
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


def crossings(events: list[Event], at_least: int = 1 << 20) -> list[Crossing]:
    """Copies of `at_least` bytes between cards; none where the profiler does not see them."""
    working: dict[int, list[Interval]] = defaultdict(list)
    copies: dict[tuple[int, int], list[tuple[Interval, int]]] = defaultdict(list)
    begin, end = float("inf"), 0.0
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        span = (event["ts"], event["ts"] + event["dur"])
        begin, end = min(begin, span[0]), max(end, span[1])
        arguments = event.get("args") or {}
        source, drain = (arguments.get(name, _device(event)) for name in ("fromDevice", "toDevice"))
        if event["cat"] == "gpu_memcpy":
            if source != drain and arguments.get("bytes", 0) >= at_least:
                copies[source, drain].append((span, arguments["bytes"]))
        elif "nccl" not in event["name"].lower():  # its kernels spin while they wait for the other card
            working[_device(event)].append(span)
    busy = {device: _union(spans) for device, spans in working.items()}
    found = []
    for (source, drain), seen in sorted(copies.items()):
        times = _union(span for span, _ in seen)
        took = sum(b - a for a, b in times)
        beside = [_common(times, busy.get(device, [])) / took for device in (source, drain)]
        found.append(
            Crossing(
                f"cuda:{source} -> cuda:{drain}",
                len(seen),
                sum(size for _, size in seen),
                took / 1e6,
                *beside,
                took / (end - begin),
            )
        )
    return found


def _device(event: Event) -> int:
    """A copy between cards names three devices; it runs on the stream of the one it is `in`."""
    arguments = event.get("args") or {}
    return int(arguments.get("device", arguments.get("inDevice", 0)))


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Sorted, without overlap."""
    whole: list[Interval] = []
    for a, b in sorted(spans):
        if whole and a <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(b, whole[-1][1])
        else:
            whole.append((a, b))
    return whole


def _common(one: list[Interval], other: list[Interval]) -> float:
    """Length of what both cover; each without overlap in itself."""
    total, at = 0.0, 0
    for a, b in one:
        while at < len(other) and other[at][1] <= a:
            at += 1
        here = at
        while here < len(other) and other[here][0] < b:
            total += min(b, other[here][1]) - max(a, other[here][0])
            here += 1
    return total
