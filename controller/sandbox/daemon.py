"""The SSH server outlives the command that started it: here it is started, found again and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from controller.project import PROJECT

from . import openssh
from .errors import SandboxError
from .pct.host import live_pid, read_pairs

START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 10


def pid(folder: Path) -> int | None:
    """The server's process id, None when it is down. It records itself only once it listens."""
    return live_pid(str(folder / "server"))


def port(folder: Path) -> int | None:
    """The port of a living server."""
    return int(read_pairs(str(folder / "server"))["port"]) if pid(folder) is not None else None


def start(folder: Path) -> None:
    """Start the embedded server as a process of its own and wait until it listens."""
    log_path = folder / "server.log"
    search = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ready_read, ready_write = os.pipe()
    with open(log_path, "ab") as log, open(ready_read, "rb") as ready:
        process = subprocess.Popen(
            [sys.executable, "-m", "controller.sandbox.sshd", str(folder), str(ready_write)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready_write,),
            start_new_session=True,
            cwd="/",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search)},
        )
        os.close(ready_write)
        process.wait()  # it leaves a child behind and ends at once
        answered = select.select([ready], [], [], START_TIMEOUT_S)[0]
        if answered and ready.readline() == b"ready\n":
            return
    lines = log_path.read_text(errors="replace").strip().splitlines() or ["no reason given"]
    raise SandboxError(f"the sandbox's SSH server did not start: {lines[-1]}", f"see {log_path}")


def stop(folder: Path) -> bool:
    """End the server, not what it has started; False when there was none."""
    server = pid(folder)
    if server is None:
        return False
    handle = os.pidfd_open(server)
    connections = openssh.connections(server) if _is_openssh(folder) else []
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], STOP_TIMEOUT_S)[0]:
                break
    finally:
        os.close(handle)
    openssh.end(connections)  # which outlive the server, as after `systemctl stop ssh`
    return True


def cut(folder: Path) -> bool:
    """Have the server break every connection; False when there is none."""
    server = pid(folder)
    if server is None:
        return False
    if _is_openssh(folder):
        openssh.end(openssh.connections(server))
    else:
        os.kill(server, signal.SIGUSR1)
    return True


def _is_openssh(folder: Path) -> bool:
    return read_pairs(str(folder / "server")).get("kind") == "openssh"
