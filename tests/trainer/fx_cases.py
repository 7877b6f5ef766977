"""Races of torch's tracing state made certain: one thread parks inside a trace, another does the work.

`python fx_cases.py` imports torch once, then forks a process for each case and fix, so none sees another's
patches; prints {"CASE/FIX": {"value": …} or {"error": "Type: text"}} as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex

from trainer import fx_threads

PATIENCE_S = 60.0
on_fake_kernel: Callable[[bool], None] | None = None  # called with: has AOTAutograd's trace begun?


@torch.library.custom_op("fxcases::park", mutates_args=())
def park_op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@park_op.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "dispatch_trace":  # torch's own state is what the cases doubt
        frame = frame.f_back
    if on_fake_kernel:
        on_fake_kernel(frame is not None)
    return torch.empty_like(x)


@contextlib.contextmanager
def parked(work: Callable[[Callable[[], None]], Any]) -> Iterator[None]:
    """Inside, a thread has gone into `work(park)` as far as its first `park()`; after, it has ended well."""
    arrived, leave = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def park() -> None:
        arrived.set()
        assert leave.wait(PATIENCE_S)

    def run() -> None:
        try:
            work(park)
        except BaseException as error:
            errors.append(error)
        finally:
            arrived.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert arrived.wait(PATIENCE_S)
    if errors:
        raise errors[0]
    try:
        yield
    finally:
        leave.set()
        thread.join()
    if errors:
        raise errors[0]


def in_make_fx(park: Callable[[], None]) -> None:
    make_fx(lambda x: (park(), x + 1)[1])(torch.ones(2))


def in_symbolic_trace(park: Callable[[], None]) -> None:
    torch.fx.symbolic_trace(lambda x: (park(), x + 1)[1])


def in_compile(park: Callable[[], None]) -> None:
    global on_fake_kernel

    def park_in_trace(in_trace: bool) -> None:
        if in_trace:
            park()

    on_fake_kernel = park_in_trace
    torch.compile(lambda x: park_op(x) + 1, backend="aot_eager", fullgraph=True)(torch.ones(2))


def compiled_before() -> Callable[[torch.Tensor], torch.Tensor]:
    function = torch.compile(lambda x: x * 2, backend="aot_eager")
    function(torch.ones(3))
    return function


class Model(torch.nn.Module):
    """Module calls and parameter look-ups, both of which a trace patches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0))
        self.tail = torch.nn.Sequential(torch.nn.GELU(), torch.nn.LayerNorm(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(torch.relu(self.linear(x)) * self.scale)


# --- cases: each returns something for JSON, or raises; `install` does nothing in runs without the fix ---


def call_during_make_fx(install: Callable[[], Any]) -> list[float]:
    install()
    function = compiled_before()
    with parked(in_make_fx):
        return function(torch.ones(3)).tolist()


def call_of_a_wrapper_made_before_install(install: Callable[[], Any]) -> list[float]:
    function = compiled_before()
    install()
    with parked(in_make_fx):
        return function(torch.ones(3)).tolist()


def call_during_symbolic_trace(install: Callable[[], Any]) -> list[float]:
    install()
    function = compiled_before()
    with parked(in_symbolic_trace):
        return function(torch.ones(3)).tolist()


def call_during_compile(install: Callable[[], Any]) -> list[float]:
    install()
    function = compiled_before()
    with parked(in_compile):
        return function(torch.ones(3)).tolist()


def eager_module_during_symbolic_trace(install: Callable[[], Any]) -> list[float]:
    install()
    with parked(in_symbolic_trace):
        return list(Model()(torch.ones(2, 4)).shape)


def compile_of_a_module_during_symbolic_trace(install: Callable[[], Any]) -> dict[str, Any]:
    install()
    model, x = Model(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with parked(in_symbolic_trace):
        out = compiled(x)
        out.sum().backward()
    compiled(x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"difference": (out - model(x)).abs().max().item(), "graphs": graphs}


def compile_of_flex_when_a_make_fx_ends(install: Callable[[], Any]) -> bool:
    install()
    global on_fake_kernel
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu")
    q = torch.randn(1, 1, 64, 8)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flex.flex_attention(park_op(q), q, q, block_mask=mask)

    others = contextlib.ExitStack()
    begun = False

    def overlap(in_trace: bool) -> None:
        nonlocal begun
        if in_trace:
            others.close()
        elif not begun:
            begun = True
            others.enter_context(parked(in_make_fx))

    on_fake_kernel = overlap
    got = torch.compile(attend, backend="aot_eager", fullgraph=True)(q)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return torch.allclose(got, wanted, atol=1e-5)


def call_after_two_traces_overlapped(install: Callable[[], Any]) -> list[float]:
    install()
    function = compiled_before()
    first, second = parked(in_make_fx), parked(in_make_fx)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # restores False
    second.__exit__(None, None, None)  # restores the True that it found
    return function(torch.ones(3)).tolist()


def nested_in_make_fx(install: Callable[[], Any]) -> None:
    install()
    make_fx(compiled_before())(torch.ones(3))


def nested_in_symbolic_trace(install: Callable[[], Any]) -> None:
    install()
    torch.fx.symbolic_trace(compiled_before())


def nested_while_another_thread_compiles(install: Callable[[], Any]) -> None:
    install()
    function = compiled_before()
    with parked(in_compile):
        make_fx(function)(torch.ones(3))


def graphs_of_a_trace(install: Callable[[], Any]) -> list[str]:
    install()
    model = Model()
    symbolic = torch.fx.symbolic_trace(model)
    concrete = make_fx(lambda x: model(x))(torch.ones(2, 4))
    assert torch.equal(symbolic(torch.ones(2, 4)), model(torch.ones(2, 4)))
    return [symbolic.code, concrete.code]


def flag_inside_a_higher_order_operator(install: Callable[[], Any]) -> list[bool]:
    install()
    seen: list[bool] = []

    def traced(x: Any) -> Any:
        from torch._higher_order_ops.utils import _set_compilation_env

        reader = torch.fx._symbolic_trace.is_fx_symbolic_tracing
        seen.append(reader())
        with _set_compilation_env():
            seen.append(reader())
        seen.append(reader())
        return x

    torch.fx.symbolic_trace(traced)
    return seen


def is_compiling_here_and_elsewhere(install: Callable[[], Any]) -> list[bool]:
    install()
    here: list[bool] = []

    def work(park: Callable[[], None]) -> None:
        in_compile(lambda: (here.append(torch.compiler.is_compiling()), park())[1])

    with parked(work):
        elsewhere = torch.compiler.is_compiling()
    return [all(here), elsewhere]


def eager_mask_annotates(install: Callable[[], Any]) -> bool:
    install()
    seen: list[bool] = []
    argsort = torch.argsort

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append("custom" in torch.fx.traceback.current_meta)
        return argsort(*args, **kwargs)

    torch.argsort = spy
    flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    return any(seen)


def compiled_mask_equals_eager(install: Callable[[], Any]) -> bool:
    install()

    def make() -> Any:
        return flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 500, 500, device="cpu")

    eager, compiled = make(), torch.compile(make, backend="aot_eager", fullgraph=True)()
    return torch.equal(eager.kv_indices, compiled.kv_indices) and torch.equal(
        eager.to_dense(), compiled.to_dense()
    )


def install_twice(install: Callable[[], Any]) -> dict[str, Any]:
    first = install()
    trace, call = torch.fx.Tracer.trace, torch.nn.Module.__call__.__code__
    second = install()
    same = trace is torch.fx.Tracer.trace and call is torch.nn.Module.__call__.__code__
    return {"report": first, "again": second, "same": same}


def install_while_another_thread_compiles(install: Callable[[], Any]) -> None:
    with parked(in_compile):
        install()


def limits_in_threads(install: Callable[[], Any]) -> dict[str, Any]:
    torch._dynamo.config.recompile_limit = 5  # what an earlier line of the own thread may have set
    seen = fx_threads.set_dynamo_limits(64)
    return {"new thread": seen, "own thread": torch._dynamo.config.recompile_limit}


def limit_raises_in_a_thread(install: Callable[[], Any]) -> str:
    fx_threads.set_dynamo_limits(2)
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    raised: list[str] = []

    def work() -> None:
        try:
            for length in range(2, 8):
                function(torch.ones(length))
        except Exception as error:
            raised.append(f"{type(error).__name__} at {length}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return raised[0]


def dense_flex_where_forbidden(install: Callable[[], Any]) -> None:
    fx_threads.forbid_dense_flex()
    fx_threads.forbid_dense_flex()
    q = torch.randn(1, 2, 512, 8)
    flex.flex_attention(q, q, q)


CASES = [value for value in list(globals().values()) if getattr(value, "__annotations__", {}).get("install")]


def main() -> None:
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes = {}
    for case in CASES:
        for fix in ("none", "full"):
            install = fx_threads.install if fix == "full" else lambda: None
            outcomes[f"{case.__name__}/{fix}"] = in_a_fork(lambda case=case, install=install: case(install))
    json.dump(outcomes, sys.stdout)


def in_a_fork(work: Callable[[], Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcome: dict[str, Any] = {"value": work()}
        except BaseException as error:
            outcome = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        with os.fdopen(writer, "w") as file:
            json.dump(outcome, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": f"process ended with status {status}"}


if __name__ == "__main__":
    main()
