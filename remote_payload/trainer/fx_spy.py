"""Shows who sets torch's tracing flag and who meets it: without both stacks this error has no cause.

    python -m trainer.fx_spy [--frames N] -- -m trainer --recipe NAME --run-dir DIR
    python -m trainer.fx_spy -- script.py ARGUMENTS        or  -- -c CODE

Runs the program in this process and watches `torch.fx`: each place that traces (a compile does), each place
that writes the flag, and each call of compiled code made while another thread was tracing. A place is printed
on stderr once, when it is first seen; totals follow at the end. The exit code is the program's.

`SET`     a thread traces: the flag is up meanwhile
`WRITTEN` it was assigned from outside (higher-order operators lower it around a compile)
`MET`     a thread that does not trace read it as up: torch then refuses the compiled call, or runs it eagerly
`HIDDEN`  it was up, but the reader looked away (torch 2.13 while any thread compiles)
`NESTED`  a thread met its own trace: that error is deserved
`APART`   another thread traced and the flag was not visible: thread-local, by torch 2.14 or fx_threads

Works on torch 2.11 to 2.14, by what is there, not by version.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import linecache
import runpy
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx._symbolic_trace as symbolic_trace

from trainer import fx_threads

FLAG = "_is_fx_tracing_flag"  # torch up to 2.13
READERS = ("is_fx_tracing", "is_fx_symbolic_tracing")
_LIBRARY = sysconfig.get_paths()["purelib"]

_NOISE = ("contextlib.py", "threading.py", "functools.py", "runpy.py")

Frames = tuple[tuple[str, int, str], ...]


@dataclass
class Place:
    """One distinct stack at which one kind of thing happened."""

    count: int = 0
    threads: set[str] = field(default_factory=set)
    seconds: float = 0.0


class Spy:
    """What was seen. Its methods run inside other threads' traces and calls, so they are short and locked."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.lock = threading.Lock()
        self.places: dict[tuple[str, str, Frames], Place] = {}
        self.tracing: dict[int, tuple[str, Frames]] = {}  # thread id -> its name, outermost trace
        self.plain: dict[str, Callable[[], bool]] = {}
        self.apart = 0

    def note(self, kind: str, detail: str, where: Frames, others: str = "") -> Place:
        """Count it; print it, with the `others` of this time, if the place is new."""
        thread = threading.current_thread().name
        with self.lock:
            key = (kind, detail, where)
            new = key not in self.places
            place = self.places.setdefault(key, Place())
            place.count += 1
            place.threads.add(thread)
        if new:
            say("\n".join([f"{kind} in thread {thread}: {detail}{others}", *picture(where)]))
        return place

    @contextmanager
    def trace(self, tracer: str) -> Iterator[None]:
        me, where = threading.get_ident(), stack(self.frames)
        with self.lock:
            outermost = me not in self.tracing
            self.tracing.setdefault(me, (threading.current_thread().name, where))
        place = self.note("SET", f"{tracer}.trace", where)
        began = time.perf_counter()
        try:
            yield
        finally:
            with self.lock:
                place.seconds += time.perf_counter() - began
                if outermost:
                    del self.tracing[me]

    def read(self, reader: str) -> bool:
        """What torch's own `reader` says, after noting it if a trace is under way."""
        said = self.plain[reader]()
        if not said and not self.tracing:
            return False
        me = threading.get_ident()
        with self.lock:
            mine = me in self.tracing
            others = [trace for thread, trace in self.tracing.items() if thread != me]
        if mine:
            if said:
                self.note("NESTED", f"{reader}() is True in a thread's own trace", stack(self.frames))
        elif said or raw_flag():
            kind, detail = "MET" if said else "HIDDEN", f"{reader}() is {said}"
            if others:
                detail += " while another thread traces at " + " and ".join(spot(w) for _, w in others)
                names = f" ({', '.join(name for name, _ in others)})"
            else:
                detail, names = f"{detail} though nobody traces: the flag is stuck", ""
            self.note(kind, detail, stack(self.frames), names)
        elif others:
            self.apart += 1
        return said

    def write(self, value: Any) -> None:
        self.note("WRITTEN", f"{FLAG} = {value}", stack(self.frames))


def raw_flag() -> bool:
    """The flag as this thread sees it, past the readers' second thoughts."""
    if hasattr(symbolic_trace, FLAG):
        return bool(getattr(symbolic_trace, FLAG))
    getter = getattr(symbolic_trace, "_get_is_fx_tracing", None)
    return bool(getter()) if getter else False


def flag_kind() -> str:
    if FLAG not in vars(symbolic_trace):
        return "thread-local in torch itself"
    patched = getattr(symbolic_trace, "_fx_thread_report", None) is not None
    return "thread-local by trainer.fx_threads" if patched else "one for all threads"


def watch(frames: int) -> Spy:
    """Start watching this process; works before and after `fx_threads.install()`."""
    spy = Spy(frames)
    torch_trace = symbolic_trace.Tracer.trace

    @functools.wraps(torch_trace)
    def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        with spy.trace(type(self).__name__):
            return torch_trace(self, *args, **kwargs)

    symbolic_trace.Tracer.trace = trace
    _hook_flag(spy)
    install = fx_threads.install

    @functools.wraps(install)
    def install_and_look_on() -> dict[str, Any]:
        report = install()
        _hook_flag(spy)  # it gave the readers new bodies and the module a new class
        return report

    fx_threads.install = install_and_look_on
    return spy


def _hook_flag(spy: Spy) -> None:
    """Put the spy under every reader (same function objects: torch.compile keeps them) and every writer."""
    symbolic_trace._fx_spy = spy
    for name, body in zip(READERS, (_is_fx_tracing, _is_fx_symbolic_tracing), strict=True):
        function = vars(symbolic_trace)[name]
        if function.__code__.co_consts != body.__code__.co_consts:
            spy.plain[name] = types.FunctionType(function.__code__, function.__globals__, name)
            function.__code__ = body.__code__.replace(
                co_filename=function.__code__.co_filename, co_firstlineno=function.__code__.co_firstlineno
            )
    module_class = type(symbolic_trace)
    if FLAG in vars(symbolic_trace) and not hasattr(module_class, "_fx_spied"):

        class Watched(module_class):  # type: ignore[misc, valid-type]
            _fx_spied = True

            def __setattr__(self, name: str, value: Any) -> None:
                if name == FLAG:
                    spy.write(value)
                super().__setattr__(name, value)

        symbolic_trace.__class__ = Watched


def _is_fx_tracing() -> bool:
    return _fx_spy.read("is_fx_tracing")  # type: ignore[name-defined]  # noqa: F821 - runs in torch's module


def _is_fx_symbolic_tracing() -> bool:
    return _fx_spy.read("is_fx_symbolic_tracing")  # type: ignore[name-defined]  # noqa: F821 - likewise


def stack(limit: int) -> Frames:
    """The calling thread's frames, innermost first: all outside installed packages, and the three innermost
    inside them; at most `limit`."""
    frame = sys._getframe(1)
    kept: list[tuple[str, int, str]] = []
    inside = 0
    while frame is not None and len(kept) < limit:
        code = frame.f_code
        library = code.co_filename.startswith((_LIBRARY, "<frozen"))
        noise = code.co_filename == __file__ or code.co_filename.endswith(_NOISE) or code.co_name in READERS
        if not noise and not (library and inside == 3):
            inside += library
            kept.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(kept)


def spot(where: Frames) -> str:
    """The innermost frame outside installed packages, as file:line."""
    own = next((f for f in where if not f[0].startswith(_LIBRARY)), where[0] if where else ("?", 0, "?"))
    return f"{Path(own[0]).name}:{own[1]}"


def picture(where: Frames) -> list[str]:
    lines = []
    for file, line, name in where:
        short = file.removeprefix(_LIBRARY).lstrip("/") if file.startswith(_LIBRARY) else file
        text = linecache.getline(file, line).strip()
        lines.append(f"    {short}:{line} {name}" + (f"    {text}" if text else ""))
    return lines


def say(text: str) -> None:
    print(f"fx-spy: {text}", file=sys.stderr, flush=True)


def totals(spy: Spy) -> str:
    """The whole count, one line a place and one in all."""
    lines = [f"torch {torch.__version__}, the tracing flag is {flag_kind()}"]
    by_kind: dict[str, int] = {}
    with spy.lock:
        places = list(spy.places.items())
    for (kind, detail, where), place in places:
        by_kind[kind] = by_kind.get(kind, 0) + place.count
        names = sorted(place.threads)
        threads = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        spent = f", {place.seconds:.2f} s" if place.seconds else ""
        lines.append(f"  {place.count} x {kind} {detail} at {spot(where)}, in {threads}{spent}")
    counts = ", ".join(
        f"{by_kind.get(kind, 0)} {kind}" for kind in ("SET", "WRITTEN", "MET", "HIDDEN", "NESTED")
    )
    stuck = raw_flag() and not spy.tracing
    end = "; the flag was left up: every later compiled call fails" if stuck else ""
    return "\n".join([*lines, f"  in all {counts}, {spy.apart} APART{end}"])


def run_program(arguments: list[str]) -> None:
    """As `python ARGUMENTS` would, in this process, under the name `__main__`."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the user's own
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.fx_spy",
        usage="%(prog)s [--frames N] -- (-m MODULE | SCRIPT | -c CODE) [ARGUMENTS]",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--frames", type=int, default=8, help="frames of a stack (default 8)")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what python would be given")
    args = parser.parse_args(argv)
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program or (program[0] in ("-m", "-c") and len(program) < 2):
        parser.error("name a program: -- -m MODULE, -- SCRIPT or -- -c CODE")
    if program[0] not in ("-m", "-c") and not Path(program[0]).is_file():
        parser.error(f"no such script: {program[0]}")
    spy = watch(args.frames)
    atexit.register(lambda: say(totals(spy)))  # after the program's threads, and after its traceback
    run_program(program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
