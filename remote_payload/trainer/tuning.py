"""Triton compiles the variants it chooses from one by one; all at once, a cold start is a minute shorter.

fla's delta rule alone has 31. What was compiled and chosen is kept in TRITON_CACHE_DIR (the agent's doing, or
that of `keep_choices`), so this matters once for each GPU, driver and version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

THREADS = 32  # at most; most of a compile runs outside Python's lock or in ptxas
# fla's memo of chunk lists is a deque that all threads iterate without a lock ("deque mutated during
# iteration"); the engine hands the chunk list in, so nothing is lost without it. FlashQLA, when installed, is
# a candidate of its own here: called from within fla it asks the device for what the engine knows. Its
# compiler, TileLang, tells of each compile on stdout.
SWITCHES = {"FLA_DISABLE_TENSOR_CACHE": "1", "FLA_FLASH_QLA": "0", "TILELANG_PRINT_ON_COMPILATION": "0"}


def set_switches() -> None:
    """Before anything imports fla or TileLang, which read their environment then."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)


def keep_choices() -> None:
    """Keep what Triton and fla find the fastest where no agent has chosen a cache, in one place for all runs:
    inductor would give each card a folder of its own. Before anything imports fla."""
    set_switches()
    with contextlib.suppress(RuntimeError):  # no home, and Triton's own place is as good as any
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path("~/.triton/cache").expanduser()))
    for name in ("TRITON_CACHE_AUTOTUNING", "FLA_CACHE_RESULTS"):
        os.environ.setdefault(name, "1")


@contextlib.contextmanager
def compiled_at_once() -> Iterator[None]:
    """Within the block all variants of an autotuned kernel are compiled together before the first is timed.

    Where Triton has no such mode (before 3.5, or not installed) they are compiled one by one, as ever. One
    that cannot be compiled is left to the tuning, which passes over it. For one thread at a time.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    tune = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1:
            arguments = {name: value for name, value in kwargs.items() if name != "warmup"}
            try:
                with (
                    ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool,
                    AsyncCompileMode(pool, ignore_errors=True),
                ):
                    self.warmup(*args, **arguments)
            except Exception:  # an inner interface that changed must cost time, not the run
                active_mode.set(None)
        return tune(self, *args, **kwargs)

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = tune
