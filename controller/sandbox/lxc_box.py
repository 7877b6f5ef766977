"""The three containers of the second engine: one privileged, one unprivileged, one that is off."""

from __future__ import annotations

import subprocess
from pathlib import Path

from . import container as ct
from . import interpreter, rootfs
from .errors import SandboxError
from .pct.host import LXC, Host

AGENT_PYTHON = "/usr/bin/python3"  # the container's own, as on a real box
OFF = 202


def start(folder: Path, host: Host, python: Path) -> None:
    """Start what is off of the two that run; the first time they get their files. Raises SandboxError."""
    off = ct.off(host) if host.engine == LXC else ct.STARTED[LXC]
    if not off:
        return
    inner_python, folders = interpreter.inspect(python, own_usr=True)
    base = None if all(Path(host.rootfs(vmid)).is_dir() for vmid in off) else rootfs.base()
    ct.set_engine(host, LXC)  # not earlier: what cannot be built must not keep the other engine away
    ct.note(host, python=str(inner_python), **({"base": str(base)} if base else {}))
    for vmid in (*off, OFF):
        ct.write_config(host, vmid, folders, unprivileged=vmid != ct.VMID)
    for vmid in off:
        ct.pct(folder, "start", str(vmid))
    _prove(folder, str(inner_python))


def _prove(folder: Path, python: str) -> None:
    """An interpreter of this machine may want libraries that the container's Debian has not."""
    done = subprocess.run(
        [folder / "bin" / "pct", "exec", str(ct.VMID), "--", python, "-I", "-c", "import ctypes, ssl"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise SandboxError(f"{python} does not run in the container: {last}", "name another with --python")
