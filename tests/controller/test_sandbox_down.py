"""Deleting the embedded box's files, runs and all, wants a word of consent; nothing is stopped without it."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import sandbox, sandbox_tasks

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def precious(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file in the container of a box that is up, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="pw", dir="/tmp")).resolve()
    monkeypatch.setenv("PCTRUN_SANDBOX", str(folder))
    try:
        sandbox.up()
        file = folder / "ct/200/root/precious"
        file.write_text("a checkpoint")
        yield file
    except sandbox.SandboxError as error:
        pytest.skip(f"no sandbox on this machine: {error.message}; {error.hint}")
    finally:
        sandbox.down(keep_data=False)
        shutil.rmtree(folder)


def down(*more: str) -> subprocess.CompletedProcess[str]:
    """As a script has it: nobody to ask."""
    return subprocess.run(
        [sys.executable, "-m", "invoke", "sandbox.down", *more],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def down_at_a_terminal(answer: bytes) -> tuple[int, str]:
    """`--wipe`, and what a person types when asked: the exit code and what was said then."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "invoke", "sandbox.down", "--wipe"]
    with subprocess.Popen(command, cwd=PROJECT, stdin=follower, stdout=follower, stderr=follower) as process:
        os.close(follower)
        said = b""
        while b"[y/N]" not in said:
            said += os.read(leader, 4096)
        os.write(leader, answer)
        try:
            while more := os.read(leader, 4096):
                said += more
        except OSError:  # Linux's end of a terminal whose programs are gone
            pass
        os.close(leader)
        return process.wait(600), said.decode().partition("[y/N]")[2]


@pytest.mark.parametrize(
    ("running", "wiped", "text"),
    [
        (
            [200, 201],
            False,
            "containers 200, 201 run on with what runs in them; invoke sandbox.down --container stops them",
        ),
        ([], False, "no container runs"),
        ([], True, "no container runs, their files are gone"),
    ],
)
def test_what_is_left_is_told_by_its_numbers(running: list[int], wiped: bool, text: str) -> None:
    assert sandbox_tasks.left(running, wiped=wiped) == text


def test_files_go_only_with_consent(precious: Path) -> None:
    refused = down("--wipe")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: nothing was deleted: nobody is here to answer 'delete all ")
    assert refused.stderr.endswith("(models stay)?'\nhint: --yes answers it\n")
    for no in (b"n\n", b"\n", b"\x04"):  # \x04: Ctrl-D
        code, said = down_at_a_terminal(no)
        assert code == 1 and said.endswith("\r\nnote: nothing was deleted\r\n"), said
        assert "error" not in said and "hint" not in said
    assert precious.exists() and sandbox.is_up(), "what was not agreed to has begun"
    assert down_at_a_terminal(b"y\n")[0] == 0
    assert not precious.exists() and not sandbox.is_up()
    again = down("--wipe")  # there is nothing to ask for
    assert (again.returncode, again.stdout.partition(":")[0]) == (0, "was down already"), again.stderr


def test_a_script_says_yes(precious: Path) -> None:
    assert down("--container").returncode == 0 and precious.exists()
    assert down("--wipe", "--yes").returncode == 0
    assert not precious.exists()
