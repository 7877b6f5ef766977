"""Lets threads compile while others run compiled code: torch keeps its tracing state per process.

While one thread traces (each compile does, for 25 to 110 ms), torch up to 2.12 makes every call of a compiled
function in every other thread raise "Detected that you are using FX to symbolically trace a dynamo-optimized
function". 2.13 hides that case by accident and 2.14 mends it, but both add races of their own, and none (2.15
included) isolates what a trace patches into `nn.Module`. `install()` makes five things thread-local:

`fx._symbolic_trace._is_fx_tracing_flag` (up to 2.13)
    The error above; overlapping traces can leave it True for ever. pytorch #126024, #118260; mended by
    #168999.
`torch.compiler._is_compiling_flag` (2.13 and later)
    True for all threads while one compiles: eager AdamW and module calls take another path, warnings get
    lost. #184614.
`flex_attention._dense_to_ordered` (2.13 and later)
    An eager block mask annotates the process-wide `fx.traceback`: KeyError 'custom', and graphs that other
    threads compile meanwhile silently get ATen calls for fused kernels. Since #182745; #184917 is open.
`nn.Module.__call__`, `nn.Module.__getattr__`, `CURRENT_PATCHER` (all versions)
    A module called in one thread enters another's tracer: NameError, lost or left-over wrappers. #189884;
    #187589 was closed unmerged.
`fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER` (all versions)
    A `make_fx` in one thread ends while another compiles flex_attention: "Cannot reenter make_fx". #189884.

A thread that really calls compiled code inside its own trace still gets torch's error.

Functions are mended by giving the same function object a new body. Rebinding the name would miss wrappers
made before (`torch.compile` keeps the reader in a closure), `from`-imports, and Dynamo, which knows these
functions by identity.

Not mended: functions registered with `torch.fx.wrap`, user-made `fx.traceback.annotate`,
`_is_exporting_flag`. And a compile ends by putting back what it found, for all threads: the CPU's default
random generator (another thread's draws come again), the default dtype, the determinism settings. Draw from
generators of your own, and set the rest before threads start.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.nn.attention.flex_attention as flex_attention

__all__ = ["forbid_dense_flex", "install", "set_dynamo_limits"]


class _ThreadState(threading.local):
    """What torch keeps for the process, for each thread. Class attributes are a thread's first values."""

    tracing = False
    compiling = False
    make_fx: Any = None
    patcher: Any = None

    def __init__(self) -> None:
        self.module_call: list[Callable[..., Any]] = []
        self.module_getattr: list[Callable[..., Any]] = []


_fx_thread = _ThreadState()


@contextlib.contextmanager
def _during(name: str, value: Any) -> Iterator[Any]:
    """This thread's state `name` is `value` inside, and what it was before after."""
    before = getattr(_fx_thread, name)
    setattr(_fx_thread, name, value)
    try:
        yield value
    finally:
        setattr(_fx_thread, name, before)


def install() -> dict[str, Any]:
    """Make tracing state thread-local: call it before threads start. Later calls return the first report.

    The report: `torch` (version); `flag`, `is_compiling`, `dense_to_ordered`, `module_patches`, `make_fx`
    ("patched", or "native" where this torch needs none); `other_threads` (names of live threads).
    Raises RuntimeError if another thread compiles now, or if tracing is visible across threads after all.
    """
    report: dict[str, Any] | None = getattr(symbolic_trace, "_fx_thread_report", None)
    if report is not None:
        return dict(report)
    compile_lock = torch._dynamo.convert_frame.compile_lock
    if not compile_lock.acquire(blocking=False):
        raise RuntimeError("another thread is compiling: call fx_threads.install() before threads start")
    try:
        report = {
            "torch": torch.__version__,
            "flag": _isolate_tracing_flag(),
            "is_compiling": _isolate_is_compiling(),
            "dense_to_ordered": _isolate_eager_masks(),
            "module_patches": _isolate_module_patches(),
            "make_fx": _isolate_make_fx(),
            "other_threads": [t.name for t in threading.enumerate() if t is not threading.current_thread()],
        }
        _prove_isolation()
    finally:
        compile_lock.release()
    symbolic_trace._fx_thread_report = report
    return dict(report)


# --- the tracing flag (up to 2.13) -------------------------------------------------------------------------


def _isolate_tracing_flag() -> str:
    if "_is_fx_tracing_flag" not in vars(symbolic_trace):
        return "native"  # 2.14+: thread-local in torch itself
    _new_body(symbolic_trace.is_fx_tracing, _is_fx_tracing)
    _new_body(symbolic_trace.is_fx_symbolic_tracing, _is_fx_symbolic_tracing)
    torch_trace = symbolic_trace.Tracer.trace

    @functools.wraps(torch_trace)
    def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _during("tracing", True):
            return torch_trace(self, *args, **kwargs)

    symbolic_trace.Tracer.trace = trace
    symbolic_trace.__class__ = _SymbolicTraceModule
    return "patched"


def _is_fx_tracing() -> bool:
    is_fx_tracing_warning()  # noqa: F821 - a name of torch.fx._symbolic_trace, where this body runs
    return _fx_thread.tracing


def _is_fx_symbolic_tracing() -> bool:
    return _fx_thread.tracing and not torch.compiler.is_compiling()


class _SymbolicTraceModule(types.ModuleType):
    """Serves the flag as an attribute: higher-order operators clear it so around a compile of their own."""

    @property
    def _is_fx_tracing_flag(self) -> bool:
        return _fx_thread.tracing

    @_is_fx_tracing_flag.setter
    def _is_fx_tracing_flag(self, value: bool) -> None:
        _fx_thread.tracing = value


# --- torch.compiler.is_compiling (2.13 and later) ----------------------------------------------------------


def _isolate_is_compiling() -> str:
    if not hasattr(torch.compiler, "_compile_session_context"):
        return "native"  # up to 2.12 only torch.export sets it
    _new_body(torch.compiler.is_compiling, _is_compiling)
    torch.compiler._compile_session_context = _compile_session_context
    return "patched"


def _is_compiling() -> bool:
    if torch.jit.is_scripting():
        return False
    return torch.compiler._is_compiling_flag or _fx_thread.compiling


def _compile_session_context() -> AbstractContextManager[Any]:
    return _during("compiling", True)


# --- eager block masks (2.13 and later) --------------------------------------------------------------------


def _isolate_eager_masks() -> str:
    if "annotate" not in flex_attention._dense_to_ordered.__code__.co_names:
        return "native"
    _new_body(flex_attention._dense_to_ordered, _dense_to_ordered)
    return "patched"


def _dense_to_ordered(dense_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., rows, columns] of 0/1 -> ones a row [..., rows], columns with ones first [..., rows, columns].

    Annotates only where it compiles: there it is a hint to inductor; eager it does nothing but race.
    """
    dense_mask = dense_mask.to(dtype=torch.int32)
    ones = dense_mask.sum(dim=-1)
    if torch.compiler.is_compiling():
        with torch.fx.traceback.annotate({"fallback_to_eager": True}):
            columns = torch.argsort(dense_mask, dim=-1, descending=True, stable=True)
    else:
        columns = torch.argsort(dense_mask, dim=-1, descending=True, stable=True)
    compact = torch.contiguous_format
    return ones.to(torch.int32, memory_format=compact), columns.to(torch.int32, memory_format=compact)


# --- what a trace patches into nn.Module (all versions) ----------------------------------------------------


def _isolate_module_patches() -> str:
    """`nn.Module.__call__` and `__getattr__` ask the thread's own stack of tracers, for good.

    A dispatcher put on the class only while someone traces (as #187589 did) is seen by Dynamo in a thread
    that compiles a module meanwhile, and breaks its graph. A new body under the old identity is not: Dynamo
    knows both functions by identity, and folds `is_dynamo_compiling()` wherever it reads the body.
    """
    for name, body in (("module_call", _module_call), ("module_getattr", _module_getattr)):
        function = getattr(symbolic_trace, f"_orig_{name}")
        plain = types.FunctionType(function.__code__, function.__globals__, function.__name__)
        function.__globals__[f"_fx_plain_{name}"] = plain
        setattr(symbolic_trace, f"_orig_{name}", plain)  # tracers call it from inside their patch
        _new_body(function, body)
    torch_patch_method = symbolic_trace._Patcher.patch_method

    @functools.wraps(torch_patch_method)
    def patch_method(self: Any, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        if cls is not torch.nn.Module:
            torch_patch_method(self, cls, name, new_fn, deduplicate)
            return
        stack = {"__call__": _fx_thread.module_call, "__getattr__": _fx_thread.module_getattr}[name]
        self.patches_made.append(_ThreadPatch(stack, new_fn))
        self.patches_made[-1].patch()

    symbolic_trace._Patcher.patch_method = patch_method
    symbolic_trace._new_patcher = _new_patcher
    symbolic_trace._maybe_revert_all_patches = _maybe_revert_all_patches
    return "patched"


def _module_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_dynamo_compiling() and _fx_thread.module_call:
        return _fx_thread.module_call[-1](self, *args, **kwargs)
    return _fx_plain_module_call(self, *args, **kwargs)  # noqa: F821 - planted in torch.nn.modules.module


def _module_getattr(self: Any, name: str) -> Any:
    if not torch.compiler.is_dynamo_compiling() and _fx_thread.module_getattr:
        return _fx_thread.module_getattr[-1](self, name)
    return _fx_plain_module_getattr(self, name)  # noqa: F821 - planted in torch.nn.modules.module


class _ThreadPatch:
    """One patch of one trace in its thread; torch takes it off and on around a compile inside the trace."""

    def __init__(self, stack: list[Callable[..., Any]], new_fn: Callable[..., Any]) -> None:
        self.stack, self.new_fn = stack, new_fn

    def patch(self) -> None:
        self.stack.append(self.new_fn)

    def revert(self) -> None:
        self.stack.remove(self.new_fn)


@contextlib.contextmanager
def _new_patcher() -> Iterator[Any]:
    with _during("patcher", symbolic_trace._Patcher()) as mine:
        try:
            yield mine
        finally:
            mine.revert_all_patches()


@contextlib.contextmanager
def _maybe_revert_all_patches() -> Iterator[None]:
    current = _fx_thread.patcher
    if current is not None:
        current.revert_all_patches()
    try:
        yield
    finally:
        if current is not None:
            current.reapply_all_patches()


# --- the tracer that higher-order operators re-enter (all versions) -----------------------------------------


def _isolate_make_fx() -> str:
    proxy_tensor._set_make_fx_tracer = _set_make_fx_tracer
    proxy_tensor.__class__ = _ProxyTensorModule
    return "patched"


def _set_make_fx_tracer(tracer: Any) -> AbstractContextManager[Any]:
    return _during("make_fx", tracer)


class _ProxyTensorModule(types.ModuleType):
    """Serves the tracer to its readers, who all import it from the module at each use."""

    @property
    def _CURRENT_MAKE_FX_TRACER(self) -> Any:
        return _fx_thread.make_fx


# --- limits and guards that go with threads ----------------------------------------------------------------


def set_dynamo_limits(recompile_limit: int = 64, *, fail_on_hit: bool = True) -> dict[str, Any]:
    """Set Dynamo's limits for every thread, autograd's device threads too; returns what a new thread sees.

    `recompile_limit` counts versions of one code object, which all threads and devices share: torch's eight
    are gone with three devices and three lengths, and past it `flex_attention` runs dense without a word;
    with `fail_on_hit` it raises FailOnRecompileLimitHit. Assigning to `torch._dynamo.config` reaches the own
    thread only: since 2.12 it is a context variable (#173568, #186537), so the default itself is changed.
    Raises RuntimeError if a new thread does not see the values.
    """
    config = torch._dynamo.config
    wanted = {"recompile_limit": recompile_limit, "fail_on_recompile_limit_hit": fail_on_hit}
    for name, value in wanted.items():
        config._config[name].default = value
        setattr(config, name, value)  # the own thread may have an override already
    seen: dict[str, Any] = {}
    _run_in_thread(lambda: seen.update({name: getattr(config, name) for name in wanted}))
    if seen != wanted:
        raise RuntimeError(f"torch {torch.__version__}: threads see Dynamo limits {seen}, wanted {wanted}")
    return seen


def forbid_dense_flex() -> None:
    """From now on a `flex_attention` that runs dense, in any thread, raises RuntimeError. For CUDA runs.

    Dense means all scores at once, [batch, heads, queries, keys] in float32, and with gradients an unlocked
    trace a call: what a wrapper that lost its compile does silently. Tracers pass (their tensors are fake);
    the backends `eager` and `aot_eager` do not (they are dense by design).
    """
    # by module name: the package re-exports the operator as torch._higher_order_ops.flex_attention
    operator = sys.modules["torch._higher_order_ops.flex_attention"]
    dense = operator.math_attention
    if getattr(dense, "_refuses_dense", False):
        return

    @functools.wraps(dense)
    def refuse_dense(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(query) in (torch.Tensor, torch.nn.Parameter):
            scores = 4 * query.shape[:-1].numel() * key.shape[-2]
            raise RuntimeError(
                f"flex_attention ran dense on {query.device}: queries {tuple(query.shape)}, keys "
                f"{tuple(key.shape)}, {scores / 2**20:.0f} MiB of scores; it was not compiled, or "
                "its compile fell back to eager (recompile limit, graph break): see the warnings above"
            )
        return dense(query, key, *args, **kwargs)

    refuse_dense._refuses_dense = True  # type: ignore[attr-defined]
    operator.math_attention = refuse_dense


# --- tools -------------------------------------------------------------------------------------------------


def _new_body(function: types.FunctionType, body: Callable[..., Any]) -> None:
    """Give `function` the code of `body`, which then runs in the module of `function`, with `_fx_thread`.

    File, line and name stay torch's: Dynamo decides by file what to skip, TorchScript reads the source there.
    """
    function.__globals__["_fx_thread"] = _fx_thread
    names = ("co_name", "co_qualname", "co_filename", "co_firstlineno")  # co_qualname: Python 3.11+
    torch_names = {
        name: getattr(function.__code__, name) for name in names if hasattr(function.__code__, name)
    }
    function.__code__ = body.__code__.replace(**torch_names)


def _run_in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function, name="fx-threads-check")
    thread.start()
    thread.join()


def _prove_isolation() -> None:
    """Trace here, look from another thread: also on a torch not yet known the report must be true."""
    here: list[bool] = []
    elsewhere: list[Any] = []

    def look() -> None:
        try:
            torch.nn.Identity()(torch.ones(1))
            elsewhere.extend([symbolic_trace.is_fx_symbolic_tracing(), torch.compiler.is_compiling()])
        except Exception as error:
            elsewhere.append(error)

    def traced(x: Any) -> Any:
        here.append(symbolic_trace.is_fx_symbolic_tracing())
        _run_in_thread(look)
        return x

    symbolic_trace.Tracer().trace(traced)
    with getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)():
        _run_in_thread(look)
    if here != [True] or elsewhere != [False] * 4:
        raise RuntimeError(
            f"torch {torch.__version__}: tracing is not thread-local here (own thread {here}, other thread "
            f"{elsewhere}); use a torch that trainer/fx_threads.py knows, or one process a device"
        )
