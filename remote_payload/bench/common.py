"""What every benchmark shares, so that their figures compare: clock, ceiling, profile, tables."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.errors import Refusal
from trainer.tuning import keep_choices

keep_choices()  # every benchmark imports this first: a second one finds what the first one tuned

CONFIGS = Path(__file__).parent / "configs"
CEILING_SIZE = 8192  # of the square product whose rate is the ceiling

# Kernel names to what they do, first match wins; the rest is element-wise work that inductor or ATen made.
_KERNEL_GROUPS = (
    ("flash/flex attention", ("flash", "fmha", "flex_attention", "cudnn_generated")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "_scaled_mm", "splitk")),
    (
        "delta rule",
        ("chunk_", "fwd_prepare_wy", "fwd_recompute", "recompute_w_u", "merge_16x16", "_solve", "solve_"),
    ),
    ("convolution", ("conv1d",)),
    ("copies", ("memcpy", "memset", "copy_kernel", "CatArrayBatched", "direct_copy", "fill")),
    ("compiled islands", ("triton_",)),
    ("l2norm", ("l2norm",)),
)


def say(text: str = "") -> None:
    """Print at once: a benchmark that is cut off still tells what it had found."""
    print(text, flush=True)


def machine(device: torch.device) -> str:
    """One line: what was measured on, and with which versions."""
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    with contextlib.suppress(ImportError):
        import triton

        versions.append(f"triton {triton.__version__}")
    return f"{name}; {', '.join(versions)}"


def default_device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def config_folder(name: str) -> Path:
    """`name` is a folder under bench/configs or a path to a model folder."""
    bundled = CONFIGS / name
    return bundled if bundled.is_dir() else Path(name)


def clock(call: Callable[[], Any], device: torch.device, *, repeats: int = 3, warmup: int = 1) -> float:
    """Median seconds of `call` on the device: CUDA events there, the host's clock on a CPU."""
    for _ in range(warmup):
        call()
    seconds: list[float] = []
    for _ in range(repeats):
        if device.type != "cuda":
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def matrix_rate(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = CEILING_SIZE, seconds: float = 0.0
) -> float:
    """FLOP/s of a size³ product of normal data (constant data draws less power and flatters): the ceiling
    that shares are given of. With `seconds` it is kept up so long, and the power limit shows."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    calls = 10

    def products() -> None:
        for _ in range(calls):
            torch.mm(a, b)

    once = clock(products, device, repeats=3)
    if seconds:
        once = clock(products, device, repeats=max(3, round(seconds / once)), warmup=0)
    return 2 * size**3 * calls / once


class Goals:
    """Rates that a measurement is held against. A missed one is told and is no failure: what ran was right,
    and the card may be a slow one."""

    def __init__(self) -> None:
        self.judged = True
        self.missed: list[str] = []

    def verdict(self, name: str, wanted: str, reached: bool) -> str:
        """What stands behind the figure; `name` and `wanted` again in the last line if it was missed."""
        if not self.judged:
            return f"goal {wanted}, not judged here"
        if not reached:
            self.missed.append(f"{name} {wanted}")
        return f"goal {wanted}: {'held' if reached else 'MISSED'}"


def concluded(run: Callable[[], list[str]], held: str = "checks", goals: Goals | None = None) -> int:
    """The exit code of a benchmark that returns its failed sections: 0 none, 1 some, 2 it was refused."""
    try:
        failures = run()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    end = f"FAILED: {', '.join(failures)}" if failures else f"all sections ran, all {held} held"
    missed = goals.missed if goals else []
    if missed:
        end += f"; {len(missed)} goal{'s' * (len(missed) > 1)} MISSED: {', '.join(missed)}"
    say("\n" + end)
    return 1 if failures else 0


@contextlib.contextmanager
def section(title: str, failures: list[str]) -> Iterator[None]:
    """Run one part of a benchmark; what it raises is printed and listed in `failures`, and the next part
    runs."""
    say(f"\n== {title}")
    began = time.perf_counter()
    try:
        yield
    except Exception as error:
        failures.append(title)
        say(f"FAILED {title}: {type(error).__name__}: {error}")
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    say(f"   ({time.perf_counter() - began:.1f} s)")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Left column to the left, figures to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        first, rest = row[0].ljust(widths[0]), [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        say("  ".join([first, *rest]))


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[float]]:
    """Yields a list that holds the peak GiB of the block once it is left; empty on a CPU."""
    found: list[float] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found.append(torch.cuda.max_memory_allocated(device) / 2**30)


def kernel_times(call: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds per group, seconds per kernel) of one profiled `call`, longest first; empty on a CPU."""
    if device.type != "cuda":
        return {}, {}
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize(device)
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        seconds = event.self_device_time_total / 1e6
        if seconds > 0:
            kernels[event.key] += seconds
            groups[_group(event.key)] += seconds
    return _longest_first(groups), _longest_first(kernels)


def print_kernel_times(call: Callable[[], Any], device: torch.device, *, kernels: int = 25) -> None:
    """Where the device's time goes: groups, then the longest kernels."""
    groups, single = kernel_times(call, device)
    if not groups:
        say("no device kernels to profile on a CPU")
        return
    total = sum(groups.values())
    table(("group", "ms", "share"), [(g, f"{s * 1e3:.1f}", f"{s / total:.1%}") for g, s in groups.items()])
    say(f"total {total * 1e3:.1f} ms of kernels")
    longest = list(single.items())[:kernels]
    table(("kernel", "ms", "share"), [(k[:90], f"{s * 1e3:.2f}", f"{s / total:.1%}") for k, s in longest])


def _group(kernel: str) -> str:
    lowered = kernel.lower()
    for group, marks in _KERNEL_GROUPS:
        if any(mark.lower() in lowered for mark in marks):
            return group
    return "other element-wise"


def _longest_first(times: dict[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1]))
