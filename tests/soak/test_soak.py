"""The soak of `benchmarks/soak.py`, short; and that what it looks for is found where it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from sampling import Sampler  # noqa: E402

ROLES = ("watch", "watch's agent", "log reader", "other agents", "server")

LEAK = """
import sys, time
kept = []
print("ready", flush=True)
while True:
    kept.append((open("/dev/null"), bytearray(1 << 20)))
    time.sleep(0.05)
"""
STEADY = "import time; kept = bytearray(8 << 20); print('ready', flush=True); time.sleep(600)"
PARENT = """
import subprocess, time
child = subprocess.Popen(["true"])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def programs() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Three real processes: one that leaks, one that does not, one that leaves a zombie."""
    sources = {"leak": LEAK, "steady": STEADY, "parent": PARENT}
    started = {
        name: subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
        for name, source in sources.items()
    }
    for process in started.values():
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def test_a_leak_and_a_zombie_are_found(programs: dict[str, subprocess.Popen[bytes]]) -> None:
    watched = [(name, process.pid) for name, process in programs.items()]
    sampler = Sampler(lambda: watched, lambda: [os.getpid()], every_s=0.1)
    ends = time.monotonic() + 60
    while not (sampler.zombies and len(sampler.growth()) >= 2):
        assert time.monotonic() < ends, (sampler.zombies, sampler.growth())
        time.sleep(0.1)
    sampler.stop()
    found = " | ".join(sampler.growth())
    assert re.search(r"leak grew from [\d.]+ to [\d.]+ MiB", found), found
    assert re.search(r"leak had \d+ files, then never less than \d+", found), found
    assert "steady" not in found
    assert "parent" not in found
    [zombie] = sampler.zombies
    assert zombie.startswith("true of ")


@pytest.mark.slow
def test_nothing_grows_and_nothing_stays() -> None:
    """Watch open, log at 5 MB/s and followed, statuses from two workstations, two restarts."""
    words = ["--seconds", "16", "--restart-every", "5", "--sample-every", "0.25"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "soak.py"), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rest = done.stdout.splitlines()
    counted = re.match(r"(\d+) statuses .*, (\d+) restarts, (\d+) logs followed", head)
    assert counted is not None, head
    statuses, restarts, followed = map(int, counted.groups())
    assert statuses >= 4
    assert restarts >= 1
    assert followed == restarts + 1
    assert {line.strip().split("  ")[0] for line in rest[:-1]} == set(ROLES)
