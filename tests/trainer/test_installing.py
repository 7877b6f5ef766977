"""A mend must work where it is read: with pip a line to run, without it the lock to correct."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"
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


def test_an_environment_without_pip_is_told_of_its_lock():
    bare = "add einops to the lock of this environment, then invoke env.build --lock FILE"
    assert said(sys.executable, "-S")[1] == bare  # -S: no site-packages, hence no pip
