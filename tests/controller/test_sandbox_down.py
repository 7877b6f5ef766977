"""Deleting the embedded box's files, runs and all, wants a word of consent; nothing is stopped without it."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller import embedded, sandbox, sandbox_tasks
from controller.errors import Unreachable
from controller.sandbox import place

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


def refused() -> bool:
    """Whether a look that comes by, as a watch that reconnects, leaves the box down."""
    try:
        embedded.up(revive=False)
    except Unreachable as error:
        assert error.message == "the sandbox was taken down by hand"
        return not sandbox.is_up()
    return False


def waits_for(lock: str) -> bool:
    return any("->" in line and lock in line for line in Path("/proc/locks").read_text().splitlines())


def wait_for(fact: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < until, f"waited in vain: {what}"
        time.sleep(0.001)


def test_a_look_while_it_goes_down_does_not_revive_it(precious: Path) -> None:
    going = threading.Thread(target=embedded.down, kwargs={"container": True, "keep_data": False})
    going.start()
    wait_for(
        lambda: not sandbox.is_up(), "the server's end"
    )  # the container's end and the files' take longer
    assert refused()
    going.join()
    assert refused() and not sandbox.running()


def test_a_look_that_waited_for_a_down_does_not_revive_it(precious: Path) -> None:
    folder = sandbox.sandbox_dir()
    sandbox.down()
    lock = f":{(folder / 'up.lock').stat().st_ino} "
    seen: list[bool] = []
    look = threading.Thread(target=lambda: seen.append(refused()))
    with place.locked(folder):
        look.start()
        wait_for(lambda: waits_for(lock), "a look at the lock")
        with embedded._going_down():
            pass
    look.join()
    assert seen == [True]


def test_a_down_that_failed_is_no_wish_unless_the_server_is_gone(precious: Path) -> None:
    folder = sandbox.sandbox_dir()
    with pytest.raises(RuntimeError), embedded._going_down():
        raise RuntimeError
    assert embedded.is_up() and not embedded.is_down_by_hand()
    pct, moved = folder / "bin/pct", folder / "bin/moved"
    pct.rename(moved)
    pct.write_text("#!/bin/sh\necho no >&2; exit 1\n")
    pct.chmod(0o755)
    failed = down("--container")
    moved.rename(pct)
    assert (failed.returncode, failed.stderr.splitlines()[0]) == (1, "error: pct stop 200: no")
    assert embedded.is_down_by_hand() and sandbox.running() == [200]


@pytest.mark.parametrize(
    ("saved", "what"), [((), "had no checkpoint"), ((5, 40), "resumes at step 40")], ids=["unsaved", "saved"]
)
def test_a_run_that_ends_with_its_container_is_told(
    precious: Path, saved: tuple[int, ...], what: str
) -> None:
    run = precious.parent / "r-0015"
    for step in saved:
        (run / f"checkpoints/step-{step:07d}").mkdir(parents=True)
        (run / f"checkpoints/step-{step:07d}/complete.json").write_text("{}")
    (run / "checkpoints/step-0000050").mkdir(parents=True)  # half written
    start = "PCTRUN_RUN_DIR=/root/r-0015 setsid sleep 600 >/dev/null 2>&1 </dev/null &"
    pct = [str(sandbox.sandbox_dir() / "bin/pct"), "exec", "200", "--", "bash", "-c", start]
    subprocess.run(pct, check=True, timeout=60)
    wait_for(lambda: bool(sandbox.living()), "the run")
    assert down().stderr == ""  # it runs on
    told = f"r-0015 was alive in container 200, {what}: invoke abort first saves it\n"
    assert down("--container").stderr == told
    assert down("--container").stderr == ""


def test_a_conversion_under_way_is_no_model(precious: Path) -> None:
    for name in (".smollm2-135m-instruct-2cmdnkhg", "smollm2-135m-instruct"):
        (sandbox.sandbox_dir() / "models" / name).mkdir()
    assert sandbox.status().models == ("smollm2-135m-instruct",)


@pytest.mark.parametrize(
    ("options", "would"),
    [
        ((), "stop the loopback SSH server"),
        (("--container",), "stop the loopback SSH server and the containers"),
        (
            ("--wipe",),
            "ask; stop the loopback SSH server and the containers; delete the containers' files",
        ),
        (
            ("--wipe", "--yes"),
            "stop the loopback SSH server and the containers; delete the containers' files",
        ),
    ],
)
def test_its_plan_has_its_order(options: tuple[str, ...], would: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "-R", "sandbox.down", *options],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"sandbox.down would {would}; nothing was done\n"
