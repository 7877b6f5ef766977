"""An import proves nothing: each role's kernel is called on this device, compared and timed before a run.

A hybrid target on the reference implementations runs at less than half its speed and says so in one log line
that nobody reads. So a run on a GPU is refused without the fast ones, unless whoever starts it insists.

`python -m trainer.kernels RECIPE|MODEL` prints the proof. Exit codes: 0 fast, 9 slow, 3 no room to try, 2
refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config import load_recipe
from trainer.errors import Refusal
from trainer.geometry import resolve
from trainer.kernel_roles import Call, Role, roles
from trainer.packing import Layout
from trainer.topology import place
from trainer.tuning import compiled_at_once, keep_choices, set_switches

set_switches()

TOKENS, LONGEST = 32_768, 4096  # the row that kernels are tuned on where no recipe names one
COMPARED_TOKENS = 8192  # of the row that is held against the reference: fills a large GPU in milliseconds
REPEATS = 5
# Largest deviation from the reference, relative to its largest value. bf16 products stay below 1 %, fp32 ones
# in tf32 below .2 %; a kernel that lets a document see the one before it deviates by tens of per cent.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 5e-3}
SLOW, NO_ROOM = 9, 3
DISTRIBUTIONS = {"fla": "flash-linear-attention"}


class NoRoom(Refusal):
    """The device is too full to try a kernel, so nothing is known about the kernels."""


@dataclass(frozen=True)
class Line:
    """What one role calls. `fast`: nothing faster is known for this device. Milliseconds: one call on
    COMPARED_TOKENS tokens, None where there was nothing to compare."""

    role: str
    function: str
    fast: bool
    milliseconds: float | None = None
    reference_milliseconds: float | None = None
    why: str = ""
    mend: str = ""

    def __str__(self) -> str:
        text = f"{self.role} by {self.function}"
        if self.milliseconds is not None and self.reference_milliseconds is not None:
            text += f", {self.milliseconds:.2f} ms (reference {self.reference_milliseconds:.2f} ms)"
        return f"{text}: {self.why}" if self.why else text


@dataclass(frozen=True)
class KernelReport:
    """The proof for one device, and the functions that the engine calls because of it.

    `attention` and `recurrence` are called as packed_ops.py says. A dense target has no recurrence. The
    convolution is called by the target unasked, so there is nothing to hand over.
    """

    device: str
    lines: tuple[Line, ...]
    attention: Call
    recurrence: Call | None = None
    convolution: None = None

    @property
    def slow(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if not line.fast)

    def line(self, role: str) -> Line:
        return next(line for line in self.lines if line.role == role)

    def as_json(self) -> dict[str, Any]:
        """{device, fast, lines[]}: for the agent and for `doctor`."""
        return {"device": self.device, "fast": not self.slow, "lines": [asdict(line) for line in self.lines]}

    def state(self) -> dict[str, Any]:
        """For state.json's `kernels`: a text for each role, and `slow[]`, which degrades every status."""
        texts: dict[str, Any] = {line.role: str(line).partition(" by ")[2] for line in self.lines}
        return {**texts, "slow": [f"{line.role}: {line.why}; {line.mend}" for line in self.slow]}

    def require_fast(self, allow_slow: bool) -> None:
        """Raises Refusal, with what to install, when a role has nothing but its reference implementation."""
        if allow_slow or not self.slow:
            return
        mends = "; ".join(dict.fromkeys(line.mend for line in self.slow))
        raise Refusal(
            f"reference kernels on {self.device}: {'; '.join(map(str, self.slow))}. Mend: {mends}; "
            "or start all the same with --allow-slow-kernels"
        )


def prove(
    config: Any, device: torch.device, dtype: torch.dtype, *, tokens: int = TOKENS, longest: int = LONGEST
) -> KernelReport:
    """Try every role of a text configuration on `device`; `tokens` and `longest`: the run's row and document.

    Triton's tuning ignores how long a row is, so the first call decides for good which variant all later ones
    get: that is why each candidate first runs on a whole row. Leaves nothing on the device. Raises NoRoom.
    """
    found = [_prove(role, device, dtype, tokens, longest) for role in roles(config)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return KernelReport(
        str(device), tuple(line for line, _ in found), **{line.role: call for line, call in found}
    )


def _prove(
    role: Role, device: torch.device, dtype: torch.dtype, tokens: int, longest: int
) -> tuple[Line, Call | None]:
    if device.type == "cpu":  # nothing faster is made for it, so there is nothing to be slower than
        return Line(role.name, _name(role.behind), True, why="a CPU has no other"), role.fallback
    try:
        with torch.no_grad(), torch.cuda.device(device):
            return race(role, device, dtype, tokens, longest)
    except torch.cuda.OutOfMemoryError:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        raise NoRoom(
            f"{device} has {free:.1f} of {total:.1f} GiB free, too little to try the {role.name} on a row of "
            f"{tokens:,} tokens: free the device, or lower data.budget"
        ) from None


def race(
    role: Role, device: torch.device, dtype: torch.dtype, tokens: int, longest: int
) -> tuple[Line, Call | None]:
    """Run each candidate on a whole row, compare and time it on a part of one; the fastest right one wins.

    Never the reference while one works: on the equal documents of the sample cuDNN's attention, document by
    document, beats the packed kernel, but it plans anew for every length it has not met (50 ms on an H200).
    """
    whole = _arguments(role, tokens, longest, device, dtype)
    part = _arguments(role, min(tokens, COMPARED_TOKENS), longest, device, dtype)
    expected = role.reference(*part)
    reference = _milliseconds(role.reference, part, device)
    chosen, behind, best = role.fallback, role.behind, math.inf
    failed: list[str] = []
    absent: list[str] = []
    for candidate in role.candidates:
        try:
            call, function = candidate.load()
            with compiled_at_once():
                call(*whole)
            deviation = _deviation(call(*part), expected)
            if not deviation <= TOLERANCE[dtype]:
                raise ValueError(f"its result is wrong by {deviation:.0%} of the largest value")
            took = _milliseconds(call, part, device)
        except torch.cuda.OutOfMemoryError:
            raise
        except ModuleNotFoundError as error:
            absent.append(f"{candidate.package}: {error.name} is not installed")
            continue
        except Exception as error:
            failed.append(f"{candidate.package}: {_words(error)}")
            continue
        if took < best:
            chosen, behind, best = None if candidate.built_in else call, function, took
    nothing_worked = math.isinf(best)
    line = Line(
        role.name,
        _name(behind),
        fast=not nothing_worked,
        milliseconds=round(reference if nothing_worked else best, 3),
        reference_milliseconds=round(reference, 3),
        why="; ".join(absent + failed if nothing_worked else failed),  # installed and of no use is said
        mend=role.mend if nothing_worked else "",
    )
    return line, chosen


def _arguments(
    role: Role, tokens: int, longest: int, device: torch.device, dtype: torch.dtype
) -> tuple[Any, ...]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    return role.sample(Layout.of(list(_lengths(tokens, longest)), device), draw)


def _lengths(tokens: int, longest: int) -> Iterator[int]:
    """Whole documents and two shorter ones of odd lengths: a border lies where no chunk of a kernel ends."""
    odd = min(longest, tokens) // 3 | 1
    rest = tokens - odd
    while rest > longest:
        yield longest
        rest -= longest
    yield from (odd, rest)


def _deviation(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _milliseconds(call: Call, arguments: tuple[Any, ...], device: torch.device) -> float:
    """Median of REPEATS calls after one that does not count."""
    call(*arguments)
    if device.type != "cuda":
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            call(*arguments)
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call(*arguments)
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def _name(function: Callable[..., Any]) -> str:
    """`package.module.function (version)` of what is really called."""
    plain = inspect.unwrap(function)
    built_in = inspect.isbuiltin(plain)  # of torch: its own name is an inner class of the bindings
    name = f"torch.{plain.__name__}" if built_in else f"{plain.__module__}.{plain.__qualname__}"
    package = name.partition(".")[0]
    try:
        return f"{name} ({importlib.metadata.version(DISTRIBUTIONS.get(package, package))})"
    except importlib.metadata.PackageNotFoundError:
        return name


def _words(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:200]


def main(argv: list[str] | None = None) -> int:
    """Print the proof for each target device of a recipe, or for a model folder on the first device."""
    args = _parser().parse_args(argv)
    keep_choices()
    try:
        reports = [prove(*where, **row) for where, row in _questions(args)]
    except Refusal as refusal:
        if args.json:
            print(json.dumps({"ok": False, "error": str(refusal)}))
        else:
            print(f"refused: {refusal}", file=sys.stderr)
        return NO_ROOM if isinstance(refusal, NoRoom) else 2
    if args.json:
        print(json.dumps({"ok": True, "reports": [report.as_json() for report in reports]}))
    else:
        for report in reports:
            for line in report.lines:
                print(f"{report.device}  {'fast' if line.fast else 'SLOW'}  {line}")
                if line.mend:
                    print(f"  mend: {line.mend}")
    return SLOW if any(report.slow for report in reports) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.kernels",
        description="Call, compare and time the kernels that a target would run on.",
        epilog="exit codes: 0 fast, 9 slow, 3 the device has no room to try, 2 refused",
    )
    parser.add_argument("what", metavar="RECIPE|MODEL", help="a recipe, or a model folder")
    parser.add_argument("--overrides", default="{}", help='JSON, e.g. {"data.budget": 8192}; with a recipe')
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser


def _questions(
    args: argparse.Namespace,
) -> Iterator[tuple[tuple[Any, torch.device, torch.dtype], dict[str, int]]]:
    """(text configuration, device, dtype) and the row's size, once for each device that holds a target."""
    if Path(args.what).is_dir():
        cuda = torch.cuda.is_available()
        device, dtype = ("cuda:0", torch.bfloat16) if cuda else ("cpu", torch.float32)
        yield (text_config(args.what), torch.device(device), dtype), {}
        return
    release_dir = Path(__file__).resolve().parent.parent
    try:
        overrides = json.loads(args.overrides)
    except ValueError as error:
        raise Refusal(f'--overrides is not JSON ({error}): write {{"data.budget": 8192}}') from None
    recipe = load_recipe(args.what, release_dir, overrides)
    devices = place(recipe, resolve(recipe))
    for device in dict.fromkeys(devices.targets):
        row = {"tokens": recipe.data.budget, "longest": recipe.data.max_document}
        yield (text_config(recipe.target.model), device, devices.dtype), row


def text_config(model: str) -> Any:
    """transformers' configuration of the language model in a folder. Raises Refusal."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, local_files_only=True).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise Refusal(f"target model {model}: {_words(error)}") from None


if __name__ == "__main__":
    sys.exit(main())
