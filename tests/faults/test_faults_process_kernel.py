"""What the kernel does to a run: memory that ends, a driver that never answers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.conftest import Box, make_box, remove_box

from .looks import look
from .table import fault

CGROUP = Path("/sys/fs/cgroup")


@pytest.fixture
def ready() -> Iterator[Box]:
    box = make_box()
    try:
        assert box.deploy().result["outcome"] == "deployed"
        yield box
    finally:
        remove_box(box)


@contextlib.contextmanager
def group(controller: str, settings: dict[str, str]) -> Iterator[Path]:
    """A control group of version 1 or 2 with those of the settings that there are; skips without one."""
    first = (CGROUP / controller).is_dir()
    folder = (CGROUP / controller if first else CGROUP) / f"pctrun-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        there = {name: value for name, value in settings.items() if (folder / name).exists()}
        if not there:
            pytest.skip(f"groups have no {controller} controller here")
        try:
            for name, value in there.items():
                (folder / name).write_text(value)
        except OSError as error:
            pytest.skip(f"the {controller} controller cannot be set here: {error.strerror}")
        yield folder
    finally:
        ends = time.monotonic() + 10
        while folder.exists() and time.monotonic() < ends:
            with contextlib.suppress(OSError):  # its processes are about to be gone
                folder.rmdir()
            time.sleep(0.02)


def interpreter_in(folder: Path, base: Path) -> str:
    """A Python that begins by joining the group; all that it starts is in it, too."""
    made = base / "python"
    made.write_text(f'#!/bin/sh\necho $$ > {folder}/cgroup.procs || exit 1\nexec {sys.executable} "$@"\n')
    made.chmod(0o755)
    return str(made)


LIMIT = str(300 << 20)
MEMORY = {  # version 1, then 2; without swap, or there would be no end
    "memory.limit_in_bytes": LIMIT,
    "memory.memsw.limit_in_bytes": LIMIT,
    "memory.max": LIMIT,
    "memory.swap.max": "0",
}


@fault(
    "the kernel ends the trainer for want of memory",
    promised="told from a person's kill, with the mend; the checkpoint is resumed",
    seen="`crashed`, exit 4: `killed by the kernel: out of memory`, mend `pct set VMID -memory MIB`",
)
def test_the_kernel_kills_for_want_of_memory(ready: Box) -> None:
    with group("memory", MEMORY) as limited:
        ready.python = interpreter_in(limited, ready.base)
        run = ready.start("eat", recipe={"save_every": 5, "step_s": 0.3}).result["run"]
        ready.wait_for(lambda: (ready.run_dir(run) / "exit.json").exists(), "its end")
        ready.python = sys.executable
        seen = look(ready)
        assert (seen.word, seen.exit_code, seen.causes) == ("crashed", 4, ("exit", "host-memory"))
        assert "killed by the kernel: out of memory" in seen.screen
        assert "pct set VMID -memory MIB" in seen.screen.splitlines()[-1]
        assert "comes from outside" not in seen.screen
        saved = seen.run["checkpoints"][-1]["step"]
        again = ready.start(recipe={"save_every": 5}).result
        assert again["resume_from"]["step"] == saved
        ready.call("stop")
    assert not limited.exists()


def test_a_kill_by_hand_is_not_taken_for_the_kernels(ready: Box) -> None:
    """Although the kernel has killed another process of the group before."""
    with group("memory", MEMORY) as limited:
        ready.python = interpreter_in(limited, ready.base)
        other = subprocess.run([ready.python, "-c", "x = b'y' * (1 << 30)"])
        assert other.returncode == -signal.SIGKILL
        ready.start()
        trainer = next(each for each in look(ready).run["processes"] if each["role"] == "trainer")
        os.kill(trainer["pid"], signal.SIGKILL)
        ready.python = sys.executable
        ready.wait_for(lambda: look(ready).run["exit"], "its end")
        seen = look(ready)
        assert seen.causes == ("killed",) and "killed by SIGKILL" in seen.screen


@fault(
    "`nvidia-smi` hangs in the driver and cannot be killed",
    promised="a look ends within its 5 s; no second one joins the hung one, however the looks end",
    seen="`degraded`, exit 2: `nvidia-smi hangs in the driver for`",
)
def test_an_nvidia_smi_that_nothing_ends(ready: Box) -> None:
    with group("freezer", {"freezer.state": "THAWED"}) as cold:
        # In a freezer of version 1 not even SIGKILL ends a process, as in a driver that hangs.
        folder = ready.base / "bin"
        folder.mkdir()
        driver = folder / "nvidia-smi"
        driver.write_text(
            f"#!/bin/sh\necho $$ >> {ready.base}/asked\necho $$ > {cold}/cgroup.procs\n"
            f"echo FROZEN > {cold}/freezer.state\n"
        )
        driver.chmod(0o755)
        ready.start()
        ready.environment["PATH"] = f"{folder}:{ready.environment['PATH']}"
        try:
            first = ready.begin("snapshot")  # a person who does not wait for its end
            ready.wait_for(lambda: (ready.base / "asked").exists(), "the question")
            first.kill()
            ready.collect(first)
            time.sleep(5.5)  # from when on a question is overdue
            took = []
            for _ in range(4):
                began = time.monotonic()
                seen = look(ready, gpu_deadline_s=1.0)
                took.append(time.monotonic() - began)
                assert (seen.word, seen.exit_code, seen.causes) == ("degraded", 2, ("nvidia-smi",))
            assert "nvidia-smi hangs in the driver for" in seen.screen
            asked = [int(pid) for pid in (ready.base / "asked").read_text().split()]
            assert len(asked) == 1 and Path(f"/proc/{asked[0]}").exists(), "the hung one, and no other"
            assert min(took) < 5, took
            assert ready.call("stop").result["outcome"] == "stopped", "and nothing waits for it"
        finally:
            (cold / "freezer.state").write_text("THAWED")
        ready.wait_for(lambda: not alive(asked[0]), "its end once the driver answers")
        driver.write_text("#!/bin/sh\necho '0, NVIDIA H200, 570.1, 1, 143771, 0, 30, 90.0, 700.0'\n")
        ready.start()
        assert "nvidia-smi" not in look(ready).causes, "it is asked again"


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()
