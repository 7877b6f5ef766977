"""OpenSSH's own server on a loopback port, with keys of its own, in front of the embedded box's `pct`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from controller.sandbox.sshd_session import PATH

from .house import House


class Sshd:
    """`port` stays the same over restarts; `fingerprint` is that of the host key in use."""

    def __init__(self, house: House) -> None:
        self.program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if self.program is None:
            pytest.skip("OpenSSH's server is not installed: apt-get install openssh-server")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # it insists; Debian's unit makes it, too
        self.base, self.house = house.base / "sshd", house
        self.base.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, *, key: str = "first", sessions: int = 10, prefix: tuple[str, ...] = (), **more: object
    ) -> None:
        """Listen; `key` names the host key, made on first use. `prefix` begins the argument list, `more` are
        lines of its configuration."""
        path = self.base / key
        if not path.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        told = subprocess.run(
            ["ssh-keygen", "-lf", f"{path}.pub"], check=True, capture_output=True, text=True
        ).stdout
        self.fingerprint = told.split()[1]
        lines = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": path,
            "AuthorizedKeysFile": f"{self.house.endpoint.identity_file}.pub",
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "MaxSessions": sessions,
            "SetEnv": f"PATH={self.house.base}/sandbox/bin:{PATH}",
            **more,
        }
        config = self.base / "config"
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        with (self.base / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, str(self.program), "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        ends = time.monotonic() + 10
        while not self._listens():
            assert self.process.poll() is None and time.monotonic() < ends, (self.base / "log").read_text()
            time.sleep(0.02)

    def stop(self, *, sessions: bool = True) -> None:
        """End the listener, and with `sessions` the connections it serves, as a stop of the host does."""
        if self.process is None:
            return
        children = self._children() if sessions else []
        self.process.terminate()
        self.process.wait(10)
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process = None

    def _children(self) -> list[int]:
        """Sessions, and the unprivileged halves of them: descendants that are sshd itself, never commands."""
        assert self.process is not None
        found = [self.process.pid]
        for pid in found:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    ids = [int(word) for word in path.read_text().split()]
                except OSError:
                    continue
                found += [each for each in ids if _name(each).startswith("sshd")]
        return found[1:]

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
