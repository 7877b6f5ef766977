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
from .pct.host import Host, read_pairs, write_pairs
from .place import SOURCES, settings

VMID = 200
MIB = 1024 * 1024


def start(folder: Path, host: Host, python: Path) -> None:
    """Configure the container for `python` and start it."""
    inner_python, folders = interpreter.inspect(python)
    write_pairs(host.settings, {"realistic": "0"} | settings(host) | {"python": str(inner_python)})
    _write_config(host, folders)
    _pct(folder, "start", str(VMID))


def stop_all(folder: Path, host: Host) -> bool:
    """Stop every container; whether one ran."""
    running = [vmid for vmid in host.vmids() if host.init_pid(vmid) is not None]
    for vmid in running:
        _pct(folder, "stop", str(vmid))
    return bool(running)


def delete_files(folder: Path) -> bool:
    """Delete what the (stopped) containers have written; whether there was anything."""
    there = (folder / "ct").exists()
    bubble.clear(str(folder / "ct"))
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
