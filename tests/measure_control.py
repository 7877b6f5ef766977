"""What a command costs beside the one thing nobody can do without: a bare `ssh … pct exec N -- true`.

    python tests/measure_control.py [--rounds 7]

Runs on an embedded box of its own in realistic mode (each `pct` call takes 0.6 s of CPU, as the real one)
and prints medians of interleaved rounds, each also as a ratio to the bare command of the same rounds, and the
CPU time of the whole process on this side. Bytecode is kept, as Python does unless it is told not to.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from controller import attach, fetch, links, sandbox, status  # noqa: E402
from controller.call import call  # noqa: E402
from controller.console import Console  # noqa: E402
from controller.endpoint import resolve  # noqa: E402
from controller.execution import execute  # noqa: E402
from controller.inventory import Box  # noqa: E402

PAUSE_S = 0.1
RUN_DIR = "/var/lib/pctrun/runs/r-0001"
ALIVE = f"""
import json, os, time
os.makedirs("{RUN_DIR}/checkpoints/step-000010", exist_ok=True)
os.chdir("{RUN_DIR}")
def write(name, value):
    open(f".{{name}}", "w").write(json.dumps(value))
    os.replace(f".{{name}}", name)
write("run.json", {{"id": "r-0001", "created": time.time(), "recipe": "smollm2-135m"}})
open("checkpoints/step-000010/complete.json", "w").write('{{"step": 10}}')
open("checkpoints/step-000010/model.safetensors", "wb").write(os.urandom(100 << 20))
metrics, log = open("metrics.jsonl", "a"), open("train.log", "a")
for step in range(100000):
    now = time.time()
    line = {{"step": step, "time": now, "loss": 3.0, "tokens": 900, "step_s": 0.2}}
    print(json.dumps(line), file=metrics, flush=True)
    print("step", step, file=log, flush=True)
    state = {{"pid": os.getpid(), "phase": "training", "step": step, "steps": 100000}}
    write("state.json", {{**state, "heartbeat": now, "progress_at": now}})
    time.sleep(0.2)
"""


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def quiet(*command: str, folder: Path = PROJECT) -> float:
    """The CPU seconds of the process that was run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp(prefix="pctrun-measure-"))
    os.environ |= {"PCTRUN_SANDBOX": str(folder / "sandbox"), "PCTRUN_STATE": str(folder / "state")}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")  # and none of it in the checkout
    try:
        measure(rounds, folder)
    finally:
        links.close_all()
        sandbox.down(container=True, keep_data=False)
        shutil.rmtree(folder, ignore_errors=True)


def measure(rounds: int, folder: Path) -> None:
    sandbox.up(realistic=True)
    box = Box(name="sandbox", sandbox=True, vmid=200, recipe="smollm2-135m")
    endpoint = resolve(box)
    line = attach.ssh_argv(box, endpoint, "r-0001")
    bare = [*line[:1], *line[2:-1], f"pct exec {endpoint.vmid} -- true"]  # without -t
    invoke = (sys.executable, "-m", "invoke")
    quiet(*invoke, "deploy")
    marks = f"PCTRUN_RUN_ID=r-0001 PCTRUN_RUN_DIR={RUN_DIR}"
    start = f"cat > /tmp/alive.py; {marks} setsid python3 /tmp/alive.py >/dev/null 2>&1 </dev/null & echo $!"
    execute(box, ["sh", "-c", start], stdin=ALIVE.encode())
    time.sleep(3)
    costs: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    empty = folder / "empty"
    empty.mkdir()
    (empty / "tasks.py").touch()
    commands = {
        "bare ssh pct exec true": bare,
        "invoke status": (*invoke, "status"),
        "invoke deploy, no change": (*invoke, "deploy"),
        "invoke runs": (*invoke, "runs"),
        "invoke doctor": (*invoke, "doctor"),
        "invoke --list": (*invoke, "--list"),
        "invoke --list, no tasks": (*invoke, "--list"),
    }
    for command in commands.values():
        quiet(*command)
    for _ in range(rounds):
        for name, command in commands.items():
            where = empty if name.endswith("no tasks") else PROJECT
            began = time.monotonic()
            cpu.setdefault(name, []).append(quiet(*command, folder=where))
            costs.setdefault(name, []).append(time.monotonic() - began)
        costs.setdefault("a look over an open connection", []).append(seconds(lambda: status.look(box)))
    costs["a tick of watch, after the first"] = ticks(box)
    unit = statistics.median(costs["bare ssh pct exec true"])
    for name, values in costs.items():
        middle = statistics.median(values)
        own = f"   {1000 * statistics.median(cpu[name]):4.0f} ms of CPU here" if name in cpu else ""
        print(f"{name:<32} {1000 * middle:8.1f} ms   {middle / unit:6.3f} of the bare command{own}")
    megabytes = 100 * 1.048576
    took = seconds(lambda: fetch.run(box, Console(), checkpoint="last", out=str(folder)))
    print(f"{'fetch of 100 MiB, verified':<32} {took:8.2f} s    {megabytes / took:.0f} MB/s")
    print(json.dumps({"load": os.getloadavg()[0], "rounds": rounds}))


def ticks(box: Box) -> list[float]:
    """Seconds between two looks beyond the pause between them: what the agent needs for one."""
    at: list[float] = []

    def look(part: dict[str, object]) -> None:
        at.append(time.monotonic())
        if len(at) == 60:
            raise KeyboardInterrupt  # as a person leaves a watch

    try:
        call(box, "watch", {"interval_s": PAUSE_S}, on_part=look)
    except KeyboardInterrupt:
        pass
    return [max(0.0, later - earlier - PAUSE_S) for earlier, later in itertools.pairwise(at[1:])]


if __name__ == "__main__":
    main()
