"""So that every task has a box to work on: brings the embedded SSH server and container 200 up and down."""

from __future__ import annotations

import base64
import hashlib
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from . import alive, daemon, lxc_box, openssh, place
from . import container as ct
from .errors import SandboxError
from .pct.host import LXC, Host, write_pairs

FOLDERS = ("bin", "host/root", "keys", "lxc", "models")


@dataclass(frozen=True)
class Endpoint:
    """How to reach the box, and the interpreters inside it for a run and for the agent."""

    host: str
    port: int
    user: str
    identity_file: Path
    host_key: str  # SHA256:… fingerprint
    known_hosts_line: str
    vmid: int
    python: str
    agent_python: str
    vmids: tuple[int, ...]  # all the containers there are; `vmid` is the one that a run uses


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
    engine: str
    containers: dict[int, bool]  # by number, whether it runs


def up(
    *,
    realistic: bool | None = None,
    python: Path | None = None,
    engine: str | None = None,
    start_stopped: bool = True,
    turn: AbstractContextManager[None] | None = None,
) -> Endpoint:
    """Start what is not running, leave what is, and say how to reach it.

    `realistic` sets whether `pct` costs what the real one does (None: as it was). `python` is bound into the
    container when that starts; a running container keeps the one it has. `engine` is one of ENGINES and holds
    until the files are wiped (None: as it was). Without `start_stopped` a container that is off on a host
    that is up stays so, as on a real one. `turn` is entered around the start, when no other `up` or `down` is
    at work any more. Raises SandboxError, and what `turn` raises.
    """
    folder = place.sandbox_dir()
    host = Host(str(folder))
    place.refuse_foreign(folder)
    ct.refuse_other_engine(host, engine)
    if daemon.pid(folder) is None or start_stopped:
        with place.locked(folder), turn or nullcontext():
            if daemon.pid(folder) is None or (start_stopped and ct.off(host)):
                _start(folder, host, python or Path(sys.executable), engine or host.engine)
    if realistic is not None and realistic != _is_realistic(host):
        with place.locked(folder):
            write_pairs(host.settings, place.settings(host) | {"realistic": str(int(realistic))})
    ct.refuse_stale(host)
    return _endpoint(folder, host)


def down(
    *, container: bool = False, keep_data: bool = True, turn: AbstractContextManager[None] | None = None
) -> bool:
    """Take the SSH server away: the box becomes unreachable, and what runs in the container runs on.

    `container=True` stops the containers, too; `keep_data=False` does that and deletes their files (models
    and keys stay). `turn` as in `up`. Returns whether anything was there to take down.
    """
    folder = place.sandbox_dir()
    if not folder.is_dir():
        return False
    host = Host(str(folder))
    place.refuse_foreign(folder)
    with place.locked(folder), turn or nullcontext():
        changed = daemon.stop(folder)
        if container or not keep_data:
            changed |= ct.stop_all(folder, host)
        if not keep_data:
            changed |= ct.delete_files(folder, host)
    return changed


def is_up() -> bool:
    """Whether the SSH server runs."""
    return daemon.pid(place.sandbox_dir()) is not None


def running() -> list[int]:
    """The containers that run, whether or not the SSH server does."""
    return ct.running(Host(str(place.sandbox_dir())))


def living() -> list[alive.Living]:
    """The runs that are alive in its containers."""
    return alive.living(Host(str(place.sandbox_dir())))


def status() -> SandboxStatus:
    """What is there now."""
    folder = place.sandbox_dir()
    host = Host(str(folder))
    server, init = daemon.pid(folder), host.init_pid(ct.VMID)
    models = folder / "models"
    return SandboxStatus(
        folder=folder,
        server_alive=server is not None,
        server_pid=server,
        port=daemon.port(folder),
        container_running=init is not None,
        container_pid=init,
        realistic=_is_realistic(host),
        python=place.settings(host).get("python"),
        models=tuple(sorted(path.name for path in models.glob("[!.]*/"))),
        size_bytes=place.size_bytes(folder),
        engine=host.engine,
        containers={vmid: host.init_pid(vmid) is not None for vmid in host.vmids()},
    )


def cut_connections() -> bool:
    """Break every SSH connection at once, as a lost network does; False when there is no server."""
    return daemon.cut(place.sandbox_dir())


def pct_calls() -> list[tuple[float, str]]:
    """When (epoch seconds) `pct` was called for which subcommand: what a command really cost."""
    record = place.sandbox_dir() / "calls.log"
    lines = record.read_text().splitlines() if record.exists() else []
    return [(float(when), name) for when, _, name in (line.partition(" ") for line in lines)]


def _start(folder: Path, host: Host, python: Path, engine: str) -> None:
    from . import needs

    needs.check(engine)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "keys").chmod(0o700)
    ct.write_front(folder)
    if engine == LXC:
        lxc_box.start(folder, host, python)
    elif ct.off(host):
        ct.start(folder, host, python)
    if daemon.pid(folder) is None:
        (openssh if engine == LXC else daemon).start(folder)


def _endpoint(folder: Path, host: Host) -> Endpoint:
    port = daemon.port(folder)
    if port is None:
        raise SandboxError("the sandbox's SSH server went away", "run the command again")
    kind, blob, *_ = (folder / "keys" / "host_ed25519.pub").read_text().split()
    digest = hashlib.sha256(base64.b64decode(blob)).digest()
    python = place.settings(host)["python"]
    return Endpoint(
        host=place.ADDRESS,
        port=port,
        user=place.USER,
        identity_file=folder / "keys" / "client_ed25519",
        host_key="SHA256:" + base64.b64encode(digest).decode().rstrip("="),
        known_hosts_line=f"[{place.ADDRESS}]:{port} {kind} {blob}",
        vmid=ct.VMID,
        python=python,
        agent_python=lxc_box.AGENT_PYTHON if host.engine == LXC else python,
        vmids=tuple(host.vmids()),
    )


def _is_realistic(host: Host) -> bool:
    return place.settings(host).get("realistic") == "1"
