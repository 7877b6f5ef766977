"""A mend must work where it is read: with pip a line to run, without it the lock to correct."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAYLOAD, GOLDEN = ROOT / "remote_payload", ROOT / "tests/golden"
SHOW = """
from trainer.installing import install_line
print(install_line("torch>=2.10"))
print(install_line("einops"))
"""


def said(python: str, *flags: str) -> list[str]:
    command = [python, *flags, "-c", SHOW]
    env = {**os.environ, "PYTHONPATH": str(PAYLOAD)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()


def test_with_pip_it_is_a_line_to_run():
    assert said(sys.executable) == [
        f"{sys.executable} -m pip install 'torch>=2.10'",
        f"{sys.executable} -m pip install einops",
    ]


def test_to_ask_for_pip_replaces_no_module_of_torch_and_warns_of_nothing():
    imported = "import sys; sys.modules['distutils'] = kept = type(sys)('distutils')"
    after = "assert sys.modules['distutils'] is kept"
    env = {**os.environ, "PYTHONPATH": str(PAYLOAD)}
    script = f"{imported}{SHOW}{after}"
    subprocess.run([sys.executable, "-W", "error", "-c", script], env=env, check=True)


def test_an_environment_without_pip_is_told_of_its_lock():
    bare = "add einops to the lock of this environment, then invoke env.build --lock FILE"
    assert said(sys.executable, "-S")[1] == bare  # -S: no site-packages, hence no pip


def test_recorded_screens_say_what_is_said_today():
    line = said(sys.executable, "-S")[1].replace("einops", "flash-linear-attention")
    recorded = json.loads((GOLDEN / "screens/degraded-slow-kernels.json").read_text("utf-8"))
    [slow] = recorded["snapshot"]["run"]["state"]["kernels"]["slow"]
    assert slow == f"recurrence: flash-linear-attention: fla is not installed; {line}"
    told = " ".join((GOLDEN / "doctor/slow-kernels.txt").read_text("utf-8").split())
    assert f"mend {line}" in told
