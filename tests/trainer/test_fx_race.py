"""The statistical reproducer, run as a command: it must fail without the fix, or success proves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PAYLOAD = Path(__file__).parents[2] / "remote_payload"


def race(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.fx_race", "--device", "cpu", "--jobs", "2", *arguments]
    return subprocess.run(command, cwd=PAYLOAD, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_with_the_fix_no_step_fails_and_results_equal_eager(tmp_path: Path) -> None:
    run = race("--fix", "full", "--processes", "2", "--json", str(tmp_path / "race.json"))
    assert run.returncode == 0, run.stdout
    assert run.stdout.startswith("OK: 0 of 2 processes and 0 of 72 steps had errors")
    summary = json.loads((tmp_path / "race.json").read_text())["summary"]
    assert summary["difference"] < 1e-4 and summary["stuck_processes"] == 0
    assert summary["graphs"] >= 2 * 6  # otherwise nothing was compiled and nothing raced


@pytest.mark.slow
def test_without_the_fix_it_fails() -> None:
    run = race("--fix", "none", "--processes", "2")
    assert run.returncode == 1
    assert run.stdout.startswith("FAILED: ")


@pytest.mark.slow
def test_with_the_fix_threads_may_call_make_fx_themselves() -> None:
    run = race("--fix", "full", "--processes", "2", "--scenario", "make-fx")
    assert run.returncode == 0, run.stdout


def test_a_wrong_number_is_refused_in_one_line() -> None:
    run = race("--processes", "0")
    assert run.returncode == 2
    assert run.stderr.strip().splitlines()[-1].endswith("argument --processes: 0 is not at least 1")
