"""OpenSSH's own server in place of the embedded one, for the engine that leaves nothing to our own parts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from .errors import SandboxError
from .pct.host import read_pairs, start_time, write_pairs
from .place import ADDRESS, USER

PROGRAM = "/usr/sbin/sshd"  # it insists on being called by its whole path
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PRIVILEGE_SEPARATION = Path("/run/sshd")  # compiled into sshd; Debian's service makes it, too
START_TIMEOUT_S = 10.0
PORTS_TRIED = 5  # a port may be taken between our look and sshd's bind

# Nothing of the machine's own /etc/ssh is read. HOME keeps the machine's .bashrc out, which bash reads.
CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/keys/host_ed25519
AuthorizedKeysFile {folder}/keys/client_ed25519.pub
AllowUsers {user}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile {folder}/sshd.pid
PrintMotd no
UseDNS no
AcceptEnv LANG LC_*
SetEnv "PATH={folder}/bin:{path}" "HOME={folder}/host/root"
"""


def start(folder: Path) -> None:
    """Start the server as a process of its own and wait until it listens. Raises SandboxError."""
    from .sshd import own_key  # asyncssh, which a command that finds the server up does without

    keys = folder / "keys"
    for name in ("host_ed25519", "client_ed25519"):
        own_key(keys / name)
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    record, log_path = folder / "server", folder / "server.log"
    last_port = int(read_pairs(str(record)).get("port", "0")) if record.exists() else 0
    for attempt in range(PORTS_TRIED):
        port = _free_port(last_port if attempt == 0 else 0)
        pid = _launch(folder, port, log_path)
        if pid is not None:
            facts = {"pid": str(pid), "start": start_time(pid) or "", "port": str(port), "kind": "openssh"}
            write_pairs(str(record), facts)
            return
    lines = log_path.read_text(errors="replace").strip().splitlines() or ["no reason given"]
    raise SandboxError(f"OpenSSH's server did not start: {lines[-1]}", f"see {log_path}")


def _launch(folder: Path, port: int, log_path: Path) -> int | None:
    """Let sshd make itself a daemon; its process id once it listens, None if it did not get there."""
    config, pid_file = folder / "sshd_config", folder / "sshd.pid"
    config.write_text(CONFIG.format(address=ADDRESS, port=port, folder=folder, user=USER, path=PATH), "utf-8")
    pid_file.unlink(missing_ok=True)
    with log_path.open("ab") as log:
        done = subprocess.run(
            [PROGRAM, "-f", str(config), "-E", str(log_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            umask=0o022,
        )
    deadline = time.monotonic() + (START_TIMEOUT_S if done.returncode == 0 else 0)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):  # written once it listens
            return int(pid_file.read_text())
        with contextlib.suppress(OSError):
            if "Cannot bind any address" in log_path.read_text(errors="replace")[-400:]:
                return None
        time.sleep(0.02)
    return None


def connections(server: int) -> list[int]:
    """The process of every connection of `server`."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if _parent(int(place.name)) == server:
                found.append(int(place.name))
    return found


def end(connections: list[int]) -> None:
    """End these connections at once, as a lost network would; what they have started goes on."""
    for pid in connections:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def _free_port(wanted: int) -> int:
    """`wanted` if nobody has it, else any."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((ADDRESS, port))
                return int(probe.getsockname()[1])
    raise SandboxError(f"no free port on {ADDRESS}")
