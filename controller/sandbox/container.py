"""Container 200 is set up by its own `pct`, so that nothing reaches it by a way a real host does not have."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from . import interpreter
from .errors import SandboxError
from .pct import bubble
from .pct.host import BUBBLEWRAP, LXC, Host, read_pairs, write_pairs
from .place import SOURCES, settings

VMID = 200
STARTED = {BUBBLEWRAP: (VMID,), LXC: (VMID, VMID + 1)}  # by `sandbox.up`
MIB = 1024 * 1024


def start(folder: Path, host: Host, python: Path) -> None:
    """Configure the container for `python` and start it."""
    inner_python, folders = interpreter.inspect(python)
    set_engine(host, BUBBLEWRAP)
    note(host, python=str(inner_python))
    write_config(host, VMID, folders, unprivileged=True)
    pct(folder, "start", str(VMID))


def off(host: Host) -> list[int]:
    """Which of the containers that `sandbox.up` starts do not run."""
    return [vmid for vmid in STARTED[host.engine] if host.init_pid(vmid) is None]


def note(host: Host, **facts: str) -> None:
    """Add to the sandbox's settings."""
    write_pairs(host.settings, {"realistic": "0"} | settings(host) | facts)


def refuse_other_engine(host: Host, engine: str | None) -> None:
    """Files of one engine are nothing that the other could start."""
    if engine not in (None, host.engine) and Path(host.folder, "ct").exists():
        raise SandboxError(
            f"the containers in {host.folder} are made by {host.engine}",
            f"invoke sandbox.down --wipe, then: invoke sandbox.up --engine {engine}",
        )


def set_engine(host: Host, engine: str) -> None:
    """Remember the engine. Configurations of another's containers, whose files are gone by now, go too."""
    if engine != host.engine:
        for vmid in host.vmids():
            Path(host.config_path(vmid)).unlink()
        note(host, engine=engine)


def running(host: Host) -> list[int]:
    """The containers that run."""
    return [vmid for vmid in host.vmids() if host.init_pid(vmid) is not None]


def stop_all(folder: Path, host: Host) -> bool:
    """Stop every container; whether one ran."""
    found = running(host)
    for vmid in found:
        pct(folder, "stop", str(vmid))
    return bool(found)


def delete_files(folder: Path, host: Host) -> bool:
    """Delete what the (stopped) containers have written; whether there was anything."""
    there = (folder / "ct").exists()
    for place in (str(folder / "ct"), host.lxc_path):
        bubble.clear(place)
    set_engine(host, BUBBLEWRAP)
    return there


def refuse_stale(host: Host) -> None:
    """A virtual environment that was made anew is not what a running container has bound."""
    init, python = host.init_pid(VMID), settings(host)["python"]
    if init is not None and not os.path.lexists(f"/proc/{init}/root{python}"):
        raise SandboxError(
            f"{python} is no longer what container {VMID} was started with",
            "invoke sandbox.down --container && invoke sandbox.up",
        )


def write_front(folder: Path) -> None:
    """The `pct` command: a shell line, because an interpreter's path may be too long for a `#!`."""
    find = f"import sys; sys.path.insert(0, {str(SOURCES)!r})"
    code = f"{find}; from pct.cli import main; sys.exit(main({str(folder)!r}))"
    draft = folder / "bin" / f"pct.{os.getpid()}"
    draft.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(code)} "$@"\n')
    draft.chmod(0o755)
    draft.replace(folder / "bin" / "pct")


def write_config(host: Host, vmid: int, folders: list[Path], *, unprivileged: bool) -> None:
    """Configuration of a container that is to start; a `lock:` or a name that someone has set stays."""
    path = host.config_path(vmid)
    old = read_pairs(path) if Path(path).exists() else {}
    kept = {key: value for key, value in old.items() if not key.startswith("mp")}
    binds = [(f"{host.folder}/models", "/models"), *((str(path), str(path)) for path in folders)]
    defaults = {
        "arch": "amd64",
        "cores": str(os.cpu_count()),
        "hostname": f"ct{vmid}",
        "memory": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB),
        "ostype": "debian",
        "rootfs": host.rootfs(vmid),
        "swap": "0",
        "unprivileged": str(int(unprivileged)),
    }
    points = {f"mp{number}": f"{source},mp={target},ro=1" for number, (source, target) in enumerate(binds)}
    write_pairs(path, defaults | kept | points)


def pct(folder: Path, *arguments: str) -> None:
    """One call of the sandbox's own pct; its refusal becomes ours."""
    done = subprocess.run(
        [folder / "bin" / "pct", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise SandboxError(f"pct {' '.join(arguments)}: {done.stderr.strip()}", f"look into {folder}")
