"""An H200's recorded answers, idle and under load: a real card for tests on machines that have none.

tests/record_nvidia_smi.py made the recording: driver 580.159.04, a card passed through to a virtual machine.
A program in nvidia-smi's place looks its arguments up there, so that each question goes its way as there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent import gpu, gpu_health
from controller import checks_gpu
from controller.endpoint import Endpoint
from tests.agent.conftest import Box

ROOT = Path(__file__).resolve().parents[2]
RECORDING = json.loads((ROOT / "tests/golden/nvidia-smi/h200.json").read_text("utf-8"))
STATES = ("idle", "busy")
DRIVER, CUDA = "580.159.04", "13.0"
PATIENT_S = 900.0  # on a machine whose cores are all at work a program starts late
PLAYER = """#!{python} -IS
import json, os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
told = json.load(open(os.path.join(folder, "told.json")))
asked = " ".join(["nvidia-smi", *sys.argv[1:]])
with open(os.path.join(folder, "asked"), "a") as notes:
    notes.write(f"{{os.getpid()}} {{asked}}\\n")
device = told["device"] and open(told["device"])
if told["hangs"]:
    time.sleep(900)
query = next((each for each in sys.argv if each.startswith("--query-gpu=")), "")
for name in query.partition("=")[2].split(","):
    if name in told["lacks"]:
        print(f'Field "{{name}}" is not a valid field to query.\\n')
        sys.exit(2)
if asked not in told["answers"]:
    print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\\n")
    sys.exit(2)
print(told["answers"][asked]["text"], end="")
sys.exit(told["answers"][asked]["code"])
"""
THROTTLE = ("clocks_throttle_reasons.active", "clocks_event_reasons.active")
# What a driver lacks that knows this dialect and none before it; the recorded one refused none of the three.
LACKS: tuple[tuple[str, ...], ...] = ((), THROTTLE[:1], THROTTLE)
SAME = {
    "index": 0,
    "name": "NVIDIA H200",
    "driver": DRIVER,
    "memory_total_mib": 143771,
    "ecc_uncorrectable": 0,
}
SHORT = {**SAME, "power_limit_w": 700.0, "fault": None}
LONG = {
    **SAME,
    "bus": "00000000:00:06.0",
    "ecc": "Enabled",
    "repairs_pending": [],
    "beyond_repair": [],
    "recovery": "None",
}
IDLE = {
    "memory_used_mib": 0,
    "temperature_c": 38,
    "throttle": ["gpu_idle"],
}  # the reserved 616 MiB are not used
BUSY = {"memory_used_mib": 883, "temperature_c": 60, "throttle": ["sw_power_cap"]}
ROWS: dict[str, dict[str, Any]] = {
    "idle": {**SHORT, **IDLE, "utilization_pct": 0, "power_w": 81.47},
    "busy": {**SHORT, **BUSY, "utilization_pct": 99, "power_w": 687.69},
}
LONG_ROWS: dict[str, dict[str, Any]] = {
    "idle": {**LONG, **IDLE, "utilization_pct": 0},
    "busy": {**LONG, **BUSY, "utilization_pct": 98},
}


def said(state: str, argv: Sequence[str]) -> str:
    return str(RECORDING[state][" ".join(argv)]["text"])


class Player:
    """The card of the recording, as programs on PATH meet it."""

    def __init__(self, folder: Path, run_root: str) -> None:
        self.folder, self.run_root = folder, run_root
        folder.mkdir()
        (folder / "nvidia-smi").write_text(PLAYER.format(python=sys.executable))
        (folder / "nvidia-smi").chmod(0o755)

    def play(
        self,
        state: str,
        *,
        lacks: Sequence[str] = (),
        hangs: bool = False,
        device: str = "",
        edit: Callable[[str], str] = str,
    ) -> None:
        """From now on the card is so; its driver knows no field of `lacks`; `edit` alters what it says.

        Who asks opens `device`.
        """
        answers = {asked: {**told, "text": edit(told["text"])} for asked, told in RECORDING[state].items()}
        told = {"answers": answers, "lacks": list(lacks), "hangs": hangs, "device": device}
        (self.folder / "told.json").write_text(json.dumps(told))
        (self.folder / "asked").unlink(missing_ok=True)

    def asked(self) -> list[tuple[int, str]]:
        """Process id and command of each question."""
        notes = self.folder / "asked"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [(int(pid), argv) for pid, _, argv in (line.partition(" ") for line in lines)]

    def row(self) -> dict[str, Any]:
        found = gpu.query(self.run_root, PATIENT_S)
        assert found["status"] == "ok", found
        (row,) = found["rows"]
        return dict(row)

    def health(self) -> dict[str, Any]:
        found = gpu_health.answer_long(gpu_health.ask_long(self.run_root, PATIENT_S))
        assert found["status"] == "ok", found
        return found


def installed(box: Box, monkeypatch: pytest.MonkeyPatch) -> Player:
    """For this process and for the box's agent alike."""
    made = Player(box.base / "bin", box.roots["run"])
    box.environment["PATH"] = f"{made.folder}:{box.environment['PATH']}"
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def judged(facts: dict[str, Any]) -> dict[str, checks_gpu.Check]:
    """`doctor`'s opinion of these facts, by check."""
    endpoint = Endpoint("pve1.example.org", 200, "/usr/bin/python3", "/usr/bin/python3", "root")
    return {check.name: check for check in checks_gpu.gpus(facts, None, endpoint, 1)}


@contextlib.contextmanager
def hung_question(run_root: str) -> Iterator[None]:
    """One that outlives its kill holds the lock for ever, as in state D."""
    with Path(run_root, "nvidia-smi.json").open("w") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        stuck = subprocess.Popen(["sleep", "900"], pass_fds=(note.fileno(),))
        json.dump({"pid": stuck.pid, "since": time.monotonic() - 100}, note)
    try:
        yield
    finally:
        stuck.kill()
        stuck.wait()
