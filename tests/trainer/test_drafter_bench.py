"""The drafter's benchmark runs through on a CPU, every section of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"


def test_the_small_run_passes_all_its_sections():
    arguments = ["--small", "--steps", "2", "--chunks", "4", "--checkpointing", "--varied", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.drafter", *arguments],
        cwd=PAYLOAD,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for section in ("weight gradients", "warm-up", "steps", "attention alone", "4 blocks a chunk", "varied"):
        assert section in done.stdout
    assert "FAILED" not in done.stdout
