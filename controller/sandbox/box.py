"""Brings the embedded box up and down: a loopback SSH server for a Proxmox host, container 200 on it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import SandboxError
from .pct import bubble
from .pct.host import Host, live_pid, read_pairs, write_pairs

VMID = 200
USER = "root"
ADDRESS = "127.0.0.1"
START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 10
MIB = 1024 * 1024
SOURCES = Path(__file__).resolve().parent
PROJECT = SOURCES.parents[1]


@dataclass(frozen=True)
class Endpoint:
    """How to reach the box, and the interpreter inside it (for the agent and for a run alike)."""

    host: str
    port: int
    user: str
    identity_file: Path
    host_key: str  # SHA256:… fingerprint
    known_hosts_line: str
    vmid: int
    python: str

    @property
    def agent_python(self) -> str:
        return self.python


@dataclass(frozen=True)
class SandboxStatus:
    """Facts about the sandbox; nothing is started or changed to get them."""

    folder: Path
    server_alive: bool
    server_pid: int | None
    port: int | None
    container_running: bool
    container_pid: int | None
    realistic: bool
    python: str | None
    models: tuple[str, ...]
    size_bytes: int


def sandbox_dir() -> Path:
    """`$PCTRUN_SANDBOX`, else `.sandbox` in the project (an installed copy: in the current directory)."""
    named = os.environ.get("PCTRUN_SANDBOX")
    if named:
        return Path(named).absolute()
    root = PROJECT if (PROJECT / "pyproject.toml").is_file() else Path.cwd()
    return root / ".sandbox"


def up(*, realistic: bool | None = None, python: Path | None = None) -> Endpoint:
    """Start what is not running, leave what is, and say how to reach it.

    `realistic` sets whether `pct` costs what the real one does (None: as it was). `python` is bound into the
    container when that starts; a running container keeps the one it has. Raises SandboxError.
    """
    folder = sandbox_dir()
    host = Host(str(folder))
    if realistic is not None and realistic != _realistic(host):
        with _lock(folder):
            write_pairs(host.settings, _settings(host) | {"realistic": "1" if realistic else "0"})
    if _port(folder) is None or host.init_pid(VMID) is None:
        with _lock(folder):
            _start(folder, host, python or Path(sys.executable))
    return _endpoint(folder, host)


def down(*, container: bool = False, keep_data: bool = True) -> bool:
    """Take the SSH server away: the box becomes unreachable, and what runs in the container runs on.

    `container=True` stops the containers, too; `keep_data=False` does that and deletes their files (models
    and keys stay). Returns whether anything was there to take down.
    """
    folder = sandbox_dir()
    if not folder.is_dir():
        return False
    host = Host(str(folder))
    with _lock(folder):
        changed = _stop_server(folder)
        if container or not keep_data:
            for vmid in host.vmids():
                if host.init_pid(vmid) is not None:
                    _pct(folder, "stop", str(vmid))
                    changed = True
        if not keep_data:
            changed = changed or (folder / "ct").exists()
            bubble.clear(str(folder / "ct"))
    return changed


def status() -> SandboxStatus:
    """What is there now."""
    folder = sandbox_dir()
    host = Host(str(folder))
    port = _port(folder)
    init = host.init_pid(VMID)
    models = folder / "models"
    return SandboxStatus(
        folder=folder,
        server_alive=port is not None,
        server_pid=live_pid(str(folder / "server")),
        port=port,
        container_running=init is not None,
        container_pid=init,
        realistic=_realistic(host),
        python=_settings(host).get("python"),
        models=tuple(sorted(path.name for path in models.iterdir() if path.is_dir()))
        if models.is_dir()
        else (),
        size_bytes=_size_bytes(folder),
    )


def cut_connections() -> bool:
    """Break every SSH connection at once, as a lost network does; False when there is no server."""
    pid = live_pid(str(sandbox_dir() / "server"))
    if pid is None:
        return False
    os.kill(pid, signal.SIGUSR1)
    return True


def _start(folder: Path, host: Host, python: Path) -> None:
    from . import interpreter, needs

    needs.check()
    for name in ("keys", "lxc", "models", "host/root", "bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "keys").chmod(0o700)
    _write_front(folder)
    if host.init_pid(VMID) is None:
        inner_python, folders = interpreter.inspect(python)
        write_pairs(host.settings, {"realistic": "0"} | _settings(host) | {"python": str(inner_python)})
        _write_config(host, folders)
        _pct(folder, "start", str(VMID))
    if _port(folder) is None:
        _stop_server(folder)  # one that lives but does not listen
        _start_server(folder)


def _write_front(folder: Path) -> None:
    """The `pct` command: a shell line, because an interpreter's path may be too long for a `#!`."""
    find = f"import sys; sys.path.insert(0, {str(SOURCES)!r})"
    code = f"{find}; from pct.cli import main; sys.exit(main({str(folder)!r}))"
    front = folder / "bin" / "pct"
    front.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(code)} "$@"\n')
    front.chmod(0o755)


def _write_config(host: Host, folders: list[Path]) -> None:
    """Configuration of a container that is to start; a `lock:` or a name that someone has set stays."""
    path = host.config_path(VMID)
    old = read_pairs(path) if Path(path).exists() else {}
    kept = {key: value for key, value in old.items() if not key.startswith("mp")}
    binds = [(f"{host.folder}/models", "/models"), *((str(path), str(path)) for path in folders)]
    defaults = {
        "arch": "amd64",
        "cores": str(os.cpu_count()),
        "hostname": f"ct{VMID}",
        "memory": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB),
        "ostype": "debian",
        "rootfs": host.rootfs(VMID),
        "swap": "0",
        "unprivileged": "1",
    }
    points = {f"mp{number}": f"{source},mp={target},ro=1" for number, (source, target) in enumerate(binds)}
    write_pairs(path, defaults | kept | points)


def _pct(folder: Path, *arguments: str) -> None:
    """One call of the sandbox's own pct; its refusal becomes ours."""
    done = subprocess.run(
        [folder / "bin" / "pct", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise SandboxError(f"pct {' '.join(arguments)}: {done.stderr.strip()}", f"look into {folder}")


def _start_server(folder: Path) -> None:
    """Start the SSH server as a process of its own and wait until it listens."""
    ready_read, ready_write = os.pipe()
    log_path = folder / "server.log"
    with open(log_path, "ab") as log, open(ready_read, "rb") as ready:
        process = subprocess.Popen(
            [sys.executable, "-m", "controller.sandbox.sshd", str(folder), str(ready_write)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready_write,),
            start_new_session=True,
            cwd="/",
            env=os.environ | {"PYTHONPATH": str(PROJECT)},
        )
        os.close(ready_write)
        process.wait()  # it leaves a child behind and ends at once
        answered = select.select([ready], [], [], START_TIMEOUT_S)[0]
        if not answered or ready.readline() != b"ready\n":
            lines = log_path.read_text(errors="replace").strip().splitlines()
            raise SandboxError(
                f"the sandbox's SSH server did not start: {lines[-1] if lines else 'no reason given'}",
                f"see {log_path}",
            )


def _stop_server(folder: Path) -> bool:
    """End the SSH server, not what it has started; False when there was none."""
    pid = live_pid(str(folder / "server"))
    if pid is None:
        return False
    handle = os.pidfd_open(pid)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], STOP_TIMEOUT_S)[0]:
                break
    finally:
        os.close(handle)
    return True


def _port(folder: Path) -> int | None:
    """The port of a living server; the server records it only once it listens."""
    record = folder / "server"
    return int(read_pairs(str(record))["port"]) if live_pid(str(record)) is not None else None


def _endpoint(folder: Path, host: Host) -> Endpoint:
    port = _port(folder)
    if port is None:
        raise SandboxError("the sandbox's SSH server went away", "run the command again")
    key = (folder / "keys" / "host_ed25519.pub").read_text().split()
    digest = hashlib.sha256(base64.b64decode(key[1])).digest()
    return Endpoint(
        host=ADDRESS,
        port=port,
        user=USER,
        identity_file=folder / "keys" / "client_ed25519",
        host_key="SHA256:" + base64.b64encode(digest).decode().rstrip("="),
        known_hosts_line=f"[{ADDRESS}]:{port} {key[0]} {key[1]}",
        vmid=VMID,
        python=_settings(host)["python"],
    )


def _settings(host: Host) -> dict[str, str]:
    return read_pairs(host.settings) if Path(host.settings).exists() else {}


def _realistic(host: Host) -> bool:
    return _settings(host).get("realistic") == "1"


def _size_bytes(folder: Path) -> int:
    """Disk space in use under `folder`, each file counted once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                facts = Path(parent, name).lstat()
                seen[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(seen.values())


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time; a second one waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "up.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
