"""So that who stops a container hears which runs it takes along: the host's own look, without the agent."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from .pct.host import Host

_RUN_DIR = b"PCTRUN_RUN_DIR="  # in the environment of all that belongs to a run
_NOTIFIER = b"agent.notifier"  # which may outlive its run for a while
_CHECKPOINT = re.compile(r"step-(\d+)")


class Living(NamedTuple):
    """A run that is alive; `step` is its last complete checkpoint's, None when it has none."""

    vmid: int
    run: str
    step: int | None


def living(host: Host) -> list[Living]:
    """The runs in the containers that run. What this user may not look at is left out."""
    inits = {
        vmid: Path(f"/proc/{init}") for vmid in host.vmids() if (init := host.init_pid(vmid)) is not None
    }
    spaces = {space: vmid for vmid, init in inits.items() if (space := _pid_namespace(init))}
    found = {
        (vmid, folder)
        for process in Path("/proc").glob("[0-9]*")
        if (vmid := spaces.get(_pid_namespace(process))) and (folder := _run_folder(process))
    }
    return [
        Living(vmid, Path(folder).name, _last_step(Path(f"{inits[vmid]}/root{folder}")))
        for vmid, folder in sorted(found)
    ]


def _pid_namespace(process: Path) -> str:
    """What tells one container's processes from another's; empty when it is gone or none of our business."""
    try:
        return str((process / "ns/pid").readlink())
    except OSError:
        return ""


def _run_folder(process: Path) -> str:
    """The folder, inside the container, of the run that the process works for; empty without one."""
    try:
        marks = (process / "environ").read_bytes().split(b"\0")
        if _NOTIFIER in (process / "cmdline").read_bytes():
            return ""
    except OSError:
        return ""
    return next((os.fsdecode(mark[len(_RUN_DIR) :]) for mark in marks if mark.startswith(_RUN_DIR)), "")


def _last_step(folder: Path) -> int | None:
    try:
        whole = [path.parent.name for path in (folder / "checkpoints").glob("*/complete.json")]
    except OSError:
        return None
    return max((int(name[1]) for each in whole if (name := _CHECKPOINT.fullmatch(each))), default=None)
