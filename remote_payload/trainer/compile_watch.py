"""A step that compiled says nothing about speed, a silent fallback is slow for ever: watch both."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters, get_compilation_metrics

# Inductor imports it in the first thread that compiles, and setuptools in it replaces distutils for the
# whole process: two threads at once can end in "AssertionError: …/distutils/core.py". Here only one runs.
with contextlib.suppress(ImportError):
    importlib.import_module("torch.utils.cpp_extension")

_LIMIT_HIT = re.compile(
    r"hit config\.(?P<limit>\w+) \((?P<value>[^)]*)\)\s+function: (?P<function>.*)\s+last reason: (?P<why>.*)"
)


@dataclass(frozen=True)
class LimitHit:
    """Dynamo gave up compiling a function: from then on it runs eager wherever no compiled version fits."""

    limit: str  # the setting: recompile_limit or accumulated_recompile_limit
    value: str
    function: str
    reason: str

    def __str__(self) -> str:
        return f"{self.function} hit {self.limit}={self.value} and runs eager; last recompile: {self.reason}"


def graphs() -> int:
    """Distinct graphs that Dynamo made in this process so far, forward and backward of one counted once."""
    return int(counters["stats"]["unique_graphs"])


def forbid_recompiles() -> None:
    """After warm-up: from now on any thread that would compile raises RuntimeError with the function and the
    guard that failed, instead of stalling all others for seconds. For the whole process, eager code aside."""
    torch.compiler.set_stance("fail_on_recompile")


def allow_recompiles() -> None:
    """Undo `forbid_recompiles`."""
    torch.compiler.set_stance("default")


@dataclass(frozen=True)
class Compile:
    """One compile that took place. `reason`: the guard that failed, None for a function's first."""

    function: str
    seconds: float
    reason: str | None

    def __str__(self) -> str:
        why = f"; recompiled: {' '.join(self.reason.split())}" if self.reason else ""
        return f"{self.function} {self.seconds:.1f} s{why}"


def compiles() -> list[Compile]:
    """The last compiles of this process (torch keeps 64), oldest first; backward passes are part of them."""
    return [
        Compile(str(m.co_name), float(m.entire_frame_compile_time_s or 0), m.recompile_reason or None)
        for m in get_compilation_metrics()
        if m.co_name
    ]


class CompileWatch:
    """Counts torch's compiles in this process, whichever thread runs them.

    Dynamo calls back at the first start and the last end of overlapping compiles (forward, lazy backward,
    CUDA graph recording), under a lock of its own, so a callback here takes microseconds and never compiles.
    An episode is the time between the two; compiles are serial within a process, so it is nearly always one
    compile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds = 0.0
        self._since: float | None = None
        self._threads: set[int] = set()
        self._moved_at: float | None = None
        self._limits = _LimitHandler()
        self._started = False

    def start(self) -> None:
        """Start watching; calling it again does nothing."""
        if self._started:
            return
        self._started = True
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)
        logging.getLogger(_LimitHandler.source).addHandler(self._limits)

    def stop(self) -> None:
        """Stop watching; the figures stay. Calling it again does nothing."""
        if not self._started:
            return
        self._started = False
        logging.getLogger(_LimitHandler.source).removeHandler(self._limits)
        for callbacks, mine in (
            (callback_handler.start_callbacks, self._on_start),
            (callback_handler.end_callbacks, self._on_end),
        ):
            if mine in callbacks:  # torch._dynamo.callback.clear() may have been faster
                callbacks.remove(mine)

    def snapshot(self) -> dict[str, Any]:
        """`count` of episodes begun, `seconds` in them, whether one is `active`, `moved_at` (epoch seconds by
        the clock as it is set now) when the last one began or ended, `threads` that compiled, `fallbacks`:
        what runs eagerly now."""
        with self._lock:
            ticks = time.perf_counter()
            running = 0.0 if self._since is None else ticks - self._since
            moved = None if self._moved_at is None else round(time.time() - (ticks - self._moved_at), 3)
            return {
                "count": self._count,
                "seconds": self._seconds + running,
                "active": self._since is not None,
                "moved_at": moved,
                "threads": len(self._threads),
                "fallbacks": [str(hit) for hit in self.limit_hits()],
            }

    def grew_since(self, mark: dict[str, Any]) -> bool:
        """Whether anything compiled between `mark`, an earlier snapshot, and now."""
        return bool(mark["active"]) or self.snapshot()["count"] > mark["count"]

    def limit_hits(self) -> list[LimitHit]:
        """What Dynamo stopped compiling since `start()`, oldest first. Any entry explains a slow run."""
        return list(self._limits.hits)

    def _on_start(self, _: Any) -> None:
        with self._lock:
            self._count += 1
            self._since = self._moved_at = time.perf_counter()
            self._threads.add(threading.get_ident())

    def _on_end(self, _: Any) -> None:
        with self._lock:
            self._moved_at = time.perf_counter()
            if self._since is not None:  # None: that compile began before start()
                self._seconds += self._moved_at - self._since
                self._since = None


class _LimitHandler(logging.Handler):
    """Dynamo tells of a limit in a warning; its metrics forget it after 64 more compiles."""

    source = "torch._dynamo.convert_frame"

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.hits: list[LimitHit] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = _LIMIT_HIT.search(record.getMessage())
        if found:
            self.hits.append(LimitHit(found["limit"], found["value"], found["function"], found["why"]))
