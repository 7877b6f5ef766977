"""How long a thread's device really works: the host of a GPU thread is ahead of it and its time says nothing.

On CUDA a piece of work lies between two events on the thread's stream, read when both have passed; nothing
waits for them. On the CPU it is host time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

AHEAD = 1  # rows that may wait on the device behind the one that runs
KEEP = 33  # pieces of work that shares and medians look back on
WAITING, REPORTING, DONE = "waiting", "reporting", "done"  # how what a thread is at may begin
ROW, EXCHANGE, STEP = "row", "exchange", "step"  # the kinds; in EXCHANGE a device waits for slower ones


class Stamp:
    """A moment of a device: of the current stream when the work before it is done, or of the CPU now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._at = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # its waiters sleep, not spin
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._at = time.perf_counter()

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block the host, without the interpreter lock, until the moment has passed."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Stamp) -> float:
        """Both on one device and passed."""
        if self._event is None or later._event is None:
            return later._at - self._at
        return self._event.elapsed_time(later._event) / 1e3


class _Piece(NamedTuple):
    kind: str
    began: Stamp
    ended: Stamp


class _Span(NamedTuple):
    """A piece that is over, in seconds of its device's time."""

    kind: str
    began: float
    ended: float


class Clock:
    """One thread's work and what it is at. Written by its thread, read by any."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._lock = threading.Lock()
        self._open: deque[_Piece] = deque()
        self._spans: deque[_Span] = deque(maxlen=KEEP)
        self._last: tuple[Stamp, float] | None = None  # where the newest span began
        self._queued: deque[Stamp] = deque()
        self.doing, self.since = "starting", time.monotonic()

    def mark(self, doing: str) -> None:
        """Say what the thread turns to; a thread that hangs is told by it."""
        self.doing, self.since = doing, time.monotonic()

    @contextmanager
    def work(self, kind: str) -> Iterator[None]:
        began = Stamp(self._device)
        yield
        piece = _Piece(kind, began, Stamp(self._device))
        with self._lock:
            self._open.append(piece)
        if kind == ROW and self._device.type == "cuda":
            self._queued.append(piece.ended)

    def keep_pace(self) -> None:
        """Wait until at most AHEAD rows are unfinished.

        Beside reading a step's numbers late, the host's only wait for its own device. Without it a host would
        run ahead as far as its channels and the stream's launch queue (about a thousand kernels) let it, and
        hold the memory of every row on the way. Waiting one row back keeps the device fed.
        """
        while len(self._queued) > AHEAD:
            self._queued.popleft().wait()

    def share(self) -> float | None:
        """Working share of the time from the first to the last begin among the recent pieces, in [0, 1]."""
        spans = self._over()
        if len(spans) < 2:
            return None
        worked = sum(span.ended - span.began for span in spans[:-1] if span.kind != EXCHANGE)
        elapsed = spans[-1].began - spans[0].began
        return min(worked / elapsed, 1.0) if elapsed > 0 else None

    def seconds(self, kind: str) -> float | None:
        """Median of the recent pieces of `kind`."""
        took = [span.ended - span.began for span in self._over() if span.kind == kind]
        return statistics.median(took) if took else None

    def _over(self) -> list[_Span]:
        with self._lock:
            while self._open and self._open[0].ended.passed():
                kind, began, ended = self._open.popleft()
                # from begin to begin, because an event's difference to one long ago has no milliseconds left
                at = self._last[1] + self._last[0].seconds_until(began) if self._last else 0.0
                self._last = began, at
                self._spans.append(_Span(kind, at, at + began.seconds_until(ended)))
            return list(self._spans)
