"""The spy names both sides of the race in a real program with two threads, and changes nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace

from trainer.fx_spy import main

PAYLOAD = Path(__file__).parents[2] / "remote_payload"
# The cases fork from a process that has imported torch: a GPU in sight would be refused there.
ENV = os.environ | {"PYTHONPATH": str(PAYLOAD), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ONE_FLAG_FOR_ALL = "_is_fx_tracing_flag" in vars(symbolic_trace)
LOOKS_AWAY = hasattr(torch.compiler, "_compile_session_context")  # 2.13: readers are mute while one compiles

# Thread "tracer" parks inside a trace; thread "caller" then calls what was compiled before.
RACE = """
import sys, threading, torch
import torch.fx._symbolic_trace as st
if "--isolate" in sys.argv:
    from trainer import fx_threads
    fx_threads.install()
inside, leave = threading.Event(), threading.Event()
double = torch.compile(lambda x: x * 2, backend="eager")
double(torch.ones(2))

def up():
    return getattr(st, "_is_fx_tracing_flag", None) or getattr(st, "_get_is_fx_tracing", lambda: False)()

@torch.library.custom_op("spy::parked", mutates_args=())
def parked(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@parked.register_fake
def _(x):
    if up():
        inside.set(); leave.wait(120)
    return torch.empty_like(x)

def waits(x):
    inside.set(); leave.wait(120)
    return x + 1

def tracer():
    if "compile" in sys.argv:
        torch.compile(lambda x: parked(x) + 1, backend="aot_eager")(torch.ones(3))
    else:
        torch.fx.symbolic_trace(waits)

def caller():
    inside.wait(120)
    try:
        for _ in range(3):
            double(torch.ones(2))
        print("called")
    except RuntimeError as error:
        print("raised", str(error)[:30])
    leave.set()

threads = [threading.Thread(target=f, name=f.__name__) for f in (tracer, caller)]
[t.start() for t in threads]
[t.join() for t in threads]
sys.exit(3)
"""


# Imports torch once, then forks a process a case, each of which runs the module as `python -m` would.
FORK = """
import json, os, runpy, sys
from pathlib import Path
import torch, trainer.fx_threads
torch.compile(torch.neg, backend="aot_eager")(torch.ones(1))  # imports half of torch
children = {}
for name, arguments in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if pid == 0:
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv[1:] = arguments
        del sys.modules["__main__"]
        runpy.run_module("trainer.fx_spy", run_name="__main__", alter_sys=True)
    children[pid] = name
for pid, name in children.items():
    Path(f"{name}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""
OWN_TRACE = (
    "import torch; f = torch.compile(torch.sin, backend='eager'); f(torch.ones(1))\n"
    "torch.fx.symbolic_trace(lambda x: f(x))"
)
CASES = {
    "trace": ["--", "race.py"],
    "compile": ["--", "race.py", "compile"],
    "isolated trace": ["--", "race.py", "--isolate"],
    "isolated compile": ["--", "race.py", "--isolate", "compile"],
    "own": ["--", "-c", OWN_TRACE],
}


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def spied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What each of CASES ended with."""
    folder = tmp_path_factory.mktemp("spied")
    (folder / "race.py").write_text(RACE)
    subprocess.run(
        [sys.executable, "-c", FORK, json.dumps(CASES)], cwd=folder, env=ENV, check=True, timeout=600
    )

    def done(name: str) -> Done:
        code, out, err = ((folder / f"{name}.{end}").read_text() for end in ("code", "out", "err"))
        return Done(int(code), out, err)

    return {name: done(name) for name in CASES}


def test_both_sides_of_a_symbolic_trace_are_named_with_their_stacks(spied):
    done = spied["trace"]
    assert done.code == 3, done.err
    frames = r"(    .*\n)*    \S*race\.py:\d+ "
    assert re.search(r"fx-spy: SET in thread tracer: Tracer\.trace\n" + frames + "tracer", done.err)
    if ONE_FLAG_FOR_ALL:
        assert done.out.startswith("raised Detected that you are using FX")
        met = r"MET in thread caller: is_fx_symbolic_tracing\(\) is True while another thread traces at race"
        caller = r"caller    double\(torch\.ones\(2\)\)"
        assert re.search(met + r"\.py:\d+ \(tracer\)\n" + frames + caller, done.err)
        assert "1 MET" in done.err and "one for all threads" in done.err
    else:
        assert done.out == "called\n" and "0 MET" in done.err and "3 APART" in done.err


def test_a_compile_that_is_met_or_hidden_is_told_apart(spied):
    done = spied["compile"]
    assert done.code == 3, done.err
    assert re.search(r"x SET \w+\.trace at race\.py:\d+, in tracer, \d+\.\d\d s", done.err)
    if not ONE_FLAG_FOR_ALL:
        assert "0 MET, 0 HIDDEN" in done.err and "3 APART" in done.err
    elif LOOKS_AWAY:
        assert done.out == "called\n" and "0 MET, 3 HIDDEN" in done.err
        assert done.err.count("HIDDEN in thread caller") == 1, "one place, however often"
    else:
        assert done.out.startswith("raised") and "1 MET, 0 HIDDEN" in done.err


@pytest.mark.parametrize("how", ["trace", "compile"])
def test_with_the_flag_made_thread_local_nobody_meets_it(spied, how):
    done = spied[f"isolated {how}"]
    assert done.code == 3 and done.out == "called\n", done.err
    assert "0 MET, 0 HIDDEN" in done.err and "3 APART" in done.err
    assert "thread-local" in done.err


def test_a_thread_that_meets_its_own_trace_is_told_so(spied):
    done = spied["own"]
    assert done.code == 1 and "RuntimeError: Detected that" in done.err
    assert "NESTED in thread MainThread" in done.err and "1 NESTED" in done.err


@pytest.mark.skipif(not ONE_FLAG_FOR_ALL, reason="this torch has no flag to assign")
def test_a_write_from_outside_and_a_flag_left_up_are_reported(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/__init__.py").touch()
    job = "import sys, torch.fx._symbolic_trace as st\nst._is_fx_tracing_flag = True\nprint(sys.argv[1:])\n"
    (tmp_path / "job/__main__.py").write_text(job)
    command = [sys.executable, "-m", "trainer.fx_spy", "--frames", "4", "--", "-m", "job", "--flag", "x"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "['--flag', 'x']\n", done.stderr
    assert "WRITTEN in thread MainThread: _is_fx_tracing_flag = True" in done.stderr
    assert "the flag was left up" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--"], "name a program"),
        (["--", "-m"], "name a program"),
        (["--", "none.py"], "no such script: none.py"),
    ],
)
def test_usage_is_one_line(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and complaint in capsys.readouterr().err
