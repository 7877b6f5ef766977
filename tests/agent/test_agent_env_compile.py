"""What is compiled in the container is compiled once, for its own GPU, and by whoever is left to do it."""

import contextlib
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.agent import tiny_packages as tiny
from tests.agent.houses import build, current, says, send, stocked, venv

COMPILED = "alpha==3.0\nbeta==1.0\n--no-binary beta\n"


@pytest.fixture(scope="module")
def house():
    with stocked() as made:
        yield made


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on this machine")
def test_a_cuda_source_is_compiled_by_the_nvcc_of_torchs_cuda_for_one_architecture(house):
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    release = said.split("release ")[1].split(",")[0]
    for version, cuda in (("2.0", release), ("1.0", "7.5")):
        send(
            house,
            tiny.wheel("torch", version, {"torch/__init__.py": "", "torch/version.py": f"cuda = '{cuda}'"}),
        )
    send(house, tiny.sdist("gamma", "1.0", "gamma.cu", tiny.CU_SOURCE))
    path = house.environment["PATH"]
    house.environment["PATH"] = f"{path}:{Path(shutil.which('nvcc')).resolve().parent}"
    lock = "torch==2.0\ngamma==1.0\n--no-binary gamma\n"
    refused = build(house, lock).error
    assert refused["kind"] == "environment" and "--arch 9.0" in refused["hint"]
    record = build(house, lock, arch="9.0").result["record"]
    [made] = record["built"]
    assert (made["nvcc"], made["arch"], record["cuda"]) == (release, "9.0", release)
    [library] = venv(house, "current").glob("lib/*/site-packages/gamma*.so")
    code = library.read_bytes()
    assert b"sm_90" in code and b"sm_80" not in code and b"compute_80" not in code
    refused = build(house, lock.replace("2.0", "1.0", 1), arch="9.0").error
    assert "no nvcc 7.x here" in refused["message"] and f"is {release}" in refused["message"]
    assert "cuda-toolkit-7-5" in refused["hint"]
    house.environment["PATH"] = path


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler on this machine")
def test_a_build_outlives_its_agent_and_its_reader_and_its_compiled_wheel_serves_the_next(house):
    go = house.base / "go"
    send(house, tiny.sdist("beta", "1.0", "beta.c", tiny.C_SOURCE, wait=str(go)))
    good = build(house, "alpha==1.0\n").result["id"]
    args = {"name": "tiny", "lock": COMPILED, "offline": True, "base": house.python}
    process = house.begin("env-build", args)
    log = venv(house, "build.log")
    house.wait_for(lambda: "compiling" in log.read_text(), "it compiles", 60)
    process.send_signal(signal.SIGKILL)
    house.collect(process)
    left = house.call("env-list").result
    assert left["current"] == good and left["building"]["operator"]["user"] == "ana"
    # pip goes on and holds the lock for its dead agent; who comes next follows it, then makes all of it anew
    second = house.begin("env-build", args, user="bob")
    seen = []
    while not any("still building" in str(frame) for frame in seen):
        seen.append(house.next_frame(second))
    second.stdout.close()
    assert house.call("env-prune").error["kind"] == "locked"
    assert house.call("stop").result["outcome"] == "nothing-to-stop"  # a build keeps nobody from that
    third = house.begin("env-build", args, user="eva")
    go.touch()
    while "broken off: it is made anew" not in str(seen[-1]):
        seen.append(house.next_frame(third))
    third.stdout.close()
    house.wait_for(lambda: current(house) != good, "the last one builds all of it, read by nobody", 90)
    found = house.call("env-list", only=["current"]).result
    assert found["half_built"] == [] and found["environments"][0]["operator"]["user"] == "eva"
    assert found["environments"][0]["packages"] == {"alpha": "3.0", "beta": "1.0"}
    assert says(house, "current", "import alpha, beta; print(alpha.VERSION, beta.answer())") == "3.0 42"
    [made] = found["environments"][0]["built"]
    again = build(house, COMPILED.replace("3.0", "4.0")).result["record"]["built"]
    assert (made["choice"], again) == ("built", [{**made, "choice": "kept"}])
    for each in (process, second, third):
        end(each)


def end(process):
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait(30)
