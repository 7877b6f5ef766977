"""Threads that share a code object lose compiled entries to each other; copies of their own do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import flex_attention

from trainer import fx_threads
from trainer.own_code import compile_own, own

PAYLOAD = Path(__file__).parents[2] / "remote_payload"

# Two threads, three shapes each, nothing left to compile: whoever compiles again has missed its entry.
TWO_THREADS = """
import sys, threading, time, torch
sys.path.insert(0, sys.argv[1])
from trainer import fx_threads
from trainer.compile_watch import forbid_recompiles
from trainer.own_code import compile_own
fx_threads.install()
sys.setswitchinterval(1e-5)

def body(x):
    return x * 2 + 1

compiled = (
    [compile_own(body, backend="eager") for _ in range(2)]
    if sys.argv[2] == "own"
    else [torch.compile(body, dynamic=False, fullgraph=True, backend="eager")] * 2
)
rows = [torch.ones(n) for n in (3, 4, 5)]
for function in compiled:
    for row in rows:
        function(row)
forbid_recompiles()
missed, end = [], time.monotonic() + float(sys.argv[3])

def call(function):
    try:
        while time.monotonic() < end and not missed:
            for row in rows:
                function(row)
    except RuntimeError as error:
        missed.append(str(error))

threads = [threading.Thread(target=call, args=(function,)) for function in compiled]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("missed" if missed else "found", *missed[:1])
"""


def look_up(whose: str, seconds: float) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS, str(PAYLOAD), whose, str(seconds)],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return done.stdout


def test_a_shared_code_object_loses_entries_which_is_why_no_thread_shares_one():
    assert look_up("shared", 120).startswith("missed Detected recompile")


def test_threads_with_code_objects_of_their_own_find_every_entry():
    assert look_up("own", 3) == "found\n"


def test_a_copy_behaves_as_the_original():
    scale = 3

    def scaled(x: torch.Tensor, by: int = 2, *, plus: int = 1) -> torch.Tensor:
        return x * by * scale + plus

    copy = own(scaled)
    assert copy.__code__ is not scaled.__code__ and copy.__qualname__ == scaled.__qualname__
    assert torch.equal(copy(torch.ones(2), plus=4), scaled(torch.ones(2), plus=4))


def test_each_copy_of_flex_attention_has_a_limit_of_its_own():
    """Functions of torch may be wrapped by Dynamo in one that all share: this one must not be."""
    fx_threads.install()
    counters = torch._dynamo.utils.counters["stats"]
    functions = [compile_own(flex_attention, backend="eager") for _ in range(2)]
    before = counters["unique_graphs"]
    for function in functions:
        for length in range(1, 6):
            heads = torch.ones(1, 1, 16 * length, 16)
            function(heads, heads, heads)
    assert counters["unique_graphs"] - before == 10
