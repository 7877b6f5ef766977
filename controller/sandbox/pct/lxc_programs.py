"""Debian's LXC as the real pct uses it: programs, each told where the sandbox keeps its containers."""

from __future__ import annotations

import os
import subprocess


def call(path: str, program: str, vmid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of LXC's programs on container `vmid` under the folder `path`."""
    return subprocess.run(
        [program, "-P", path, "-n", str(vmid), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def init_pid(path: str, vmid: int) -> int | None:
    """Process id of the container's init as LXC's monitor tells it; None when it is stopped."""
    if not os.path.exists(f"{path}/{vmid}/config"):
        return None
    words = call(path, "lxc-info", vmid, "--pid", "--no-humanize").stdout.split()
    return int(words[0]) if words and words[0].isdigit() else None
