"""OpenSSH's own server on a loopback port: what is measured must not be our server's speed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

_START_S = 10.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Sshd:
    """Logs in whoever has `client_key`'s private half; `pct` is the one in `programs`, also as /usr/sbin/pct.

    Attributes: `port`, `host_key` (SHA256:…), `known_hosts` (a file).
    """

    def __init__(self, folder: Path, programs: Path, client_key: Path) -> None:
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None:
            sys.exit("error: OpenSSH's server is not here\nhint: apt-get install openssh-server")
        folder.mkdir()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # it insists; Debian's unit makes it, too
        key = folder / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        told = subprocess.run(["ssh-keygen", "-lf", f"{key}.pub"], check=True, capture_output=True, text=True)
        self.host_key = told.stdout.split()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {key.with_suffix('.pub').read_text()}")
        front = folder / "front"
        front.write_text(
            "#!/bin/bash\n"
            f'/usr/sbin/pct() {{ exec {programs}/pct "$@"; }}  # Ansible names it in full\n'
            'eval "$SSH_ORIGINAL_COMMAND"\n'
        )
        front.chmod(0o755)
        lines = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": key,
            "AuthorizedKeysFile": client_key,
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "ForceCommand": front,
            "SetEnv": f"PATH={programs}:{_PATH}",
        }
        config = folder / "config"
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self._process = subprocess.Popen(
            [program, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stderr=(folder / "log").open("wb"),
            start_new_session=True,
        )
        ends = time.monotonic() + _START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > ends:
                sys.exit(f"error: sshd did not start: {(folder / 'log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """No new connections; those that are open end with their clients."""
        self._process.terminate()
        self._process.wait(_START_S)

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False
