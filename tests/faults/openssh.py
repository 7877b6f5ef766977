"""OpenSSH's own server in front of the embedded box's `pct`, which can lose its sessions, too."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from benchmarks import loopback_sshd

from .house import House


class Sshd(loopback_sshd.Sshd):
    """Not started yet; skips where there is no OpenSSH server."""

    def __init__(self, house: House, name: str = "sshd") -> None:
        keys = house.endpoint.identity_file.with_suffix(".pub")
        try:
            super().__init__(house.base / name, house.base / "sandbox" / "bin", keys)
        except SystemExit as error:
            pytest.skip(str(error))

    def kill(self) -> None:
        """End the listener and the connections that it serves, as a stop of the host does."""
        sessions = self._sessions()
        self.stop()
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _sessions(self) -> list[int]:
        """Descendants that are sshd itself, unprivileged halves included, never a command of theirs."""
        found = [self.process.pid] if self.process else []
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended by itself
                for path in Path(f"/proc/{pid}/task").glob("*/children"):
                    found += [each for each in map(int, path.read_text().split()) if _is_sshd(each)]
        return found[1:]


def _is_sshd(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("sshd")
    except OSError:
        return False
