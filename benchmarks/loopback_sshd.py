"""OpenSSH's own server on a loopback port: what is measured or broken must not be our own server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_START_S = 10.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Sshd:
    """Logs in whoever has `client_key`'s private half; `pct` is the one in `programs`.

    Attributes: `port`, the same over restarts; `log` (a file); of the key in use `host_key` (SHA256:…),
    `public_key` and `known_hosts` (files). SystemExit where OpenSSH's server is missing or does not start.
    """

    def __init__(self, folder: Path, programs: Path, client_key: Path) -> None:
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None:
            sys.exit("error: OpenSSH's server is not here\nhint: apt-get install openssh-server")
        folder.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # it insists; Debian's unit makes it, too
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.folder, self._program = folder, program
        self.known_hosts, self.log = folder / "known_hosts", folder / "log"
        self._options: dict[str, object] = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "AuthorizedKeysFile": client_key,
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "SetEnv": f"PATH={programs}:{_PATH}",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, key: str = "host_key", prefix: Sequence[str] = (), **options: object) -> None:
        """Listen; `key` names the host key, made on first use, `options` are sshd_config's.

        `prefix`: what executes the server, such as `unshare …`.
        """
        path = self.folder / key
        if not path.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        self.public_key = path.with_suffix(".pub")
        told = subprocess.run(
            ["ssh-keygen", "-lf", str(self.public_key)], check=True, capture_output=True, text=True
        )
        self.host_key = told.stdout.split()[1]
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {self.public_key.read_text()}")
        config = self.folder / "config"
        lines = {**self._options, "HostKey": path, **options}
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        with self.log.open("ab") as said:
            self.process = subprocess.Popen(
                [*prefix, self._program, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        ends = time.monotonic() + _START_S
        while not self._listens():
            if self.process.poll() is not None or time.monotonic() > ends:
                sys.exit(f"error: sshd did not start: {self.log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """No new connections; those that are open end with their clients."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(_START_S)
            self.process = None

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False


def front_for_ansible(folder: Path, programs: Path) -> Path:
    """A ForceCommand under which /usr/sbin/pct, which Ansible names in full, is the one in `programs`."""
    front = folder / "front"
    front.write_text(
        f'#!/bin/bash\n/usr/sbin/pct() {{ exec {programs}/pct "$@"; }}\neval "$SSH_ORIGINAL_COMMAND"\n'
    )
    front.chmod(0o755)
    return front
