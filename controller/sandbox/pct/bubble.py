"""A container that needs no root: bubblewrap with name spaces of its own, and an init that reaps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import IO

from .host import Failure, Host, start_time, write_pairs

KEPT = ("opt", "var", "root")  # a restart keeps these,
EMPTIED = ("run", "tmp")  # and empties these, as a reboot does
SKELETON = ("var/cache", "var/lib", "var/log", "run/lock")
STICKY = ("tmp", "var/tmp")

# Process 1. It cannot be killed from inside, reaps what is orphaned while it waits, and ends cleanly on
# `halt`: SIGTERM to all, then wait until it is alone.
INIT = r"""
chmod 1777 /dev/shm
exec 3<>/run/initctl
echo ready >&4
exec 4>&-
until read -r -u 3 word && [ "$word" = halt ]; do :; done
kill -TERM -1
while set -- /proc/[0-9]*; [ $# -gt 1 ]; do read -r -t 0.05 -u 3 word; done
"""
READY_FD = 4


def start(host: Host, vmid: int, config: dict[str, str]) -> None:
    """Start container `vmid`; returns when its init runs. It outlives this process and the SSH server."""
    rootfs = host.rootfs(vmid)
    prepare(rootfs)
    log_path = f"{rootfs}/start.log"
    with open(log_path, "w+b") as log:
        init = _launch(arguments(rootfs, config, vmid), log)
        if init is None:
            log.seek(0)
            reason = log.read().decode(errors="replace").strip() or "bwrap ended without a word"
            raise Failure(255, f"startup for container '{vmid}' failed: {reason}")
    write_pairs(host.state_path(vmid), {"pid": str(init), "start": start_time(init) or ""})


def _launch(args: list[str], log: IO[bytes]) -> int | None:
    """Run bwrap; the host's process id of init once init is ready, None if it did not get there."""
    info_read, info_write = os.pipe()
    ready_read, ready_write = os.pipe()
    args_read, args_write = os.pipe()
    # Arguments travel through a pipe, so that no process list shows the host's paths to the container.
    os.write(args_write, b"".join(os.fsencode(arg) + b"\0" for arg in args))
    os.close(args_write)
    script = f"exec {READY_FD}>&{ready_write} {ready_write}>&-\n{INIT}" if ready_write != READY_FD else INIT
    command = ["bwrap", "--args", str(args_read), "--info-fd", str(info_write), "--"]
    process = subprocess.Popen(
        [*command, "/bin/bash", "--norc", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(info_write, ready_write, args_read),
        start_new_session=True,
        cwd="/",
        umask=0o022,
    )
    for fd in (info_write, ready_write, args_read):
        os.close(fd)
    with open(info_read, "rb") as info, open(ready_read, "rb") as ready:
        text = info.read()
        if ready.readline() == b"ready\n":
            return int(json.loads(text)["child-pid"])
    process.wait()
    return None


def prepare(rootfs: str) -> None:
    """Make the private folders; empty those that do not survive a restart."""
    for name in EMPTIED:
        clear(f"{rootfs}/{name}")
    for name in (*KEPT, *EMPTIED, *SKELETON, *STICKY):
        os.makedirs(f"{rootfs}/{name}", exist_ok=True)
    for name in STICKY:
        os.chmod(f"{rootfs}/{name}", 0o1777)
    os.chmod(f"{rootfs}/root", 0o700)
    if not os.path.lexists(f"{rootfs}/var/run"):
        os.symlink("/run", f"{rootfs}/var/run")
    os.mkfifo(f"{rootfs}/run/initctl", 0o600)


def clear(folder: str) -> None:
    """Remove a tree of the container, folders without write permission included. Links are not followed."""
    if not os.path.lexists(folder):
        return
    for parent, names, _ in os.walk(folder):
        for path in (f"{parent}/{name}" for name in names):
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder)


def arguments(rootfs: str, config: dict[str, str], vmid: int) -> list[str]:
    """bwrap's arguments: the host's programs read-only, own folders writable, everything else absent."""
    args = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1"]
    args += ["--uid", "0", "--gid", "0", "--hostname", config.get("hostname", f"ct{vmid}")]
    args += ["--clearenv", "--setenv", "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    args += ["--setenv", "container", "lxc", "--setenv", "TERM", "linux", "--chdir", "/"]
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc"):
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            args += ["--ro-bind", path, path]
    args += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm", "--ro-bind", "/sys", "/sys"]
    for path in ("/home", "/mnt", "/srv"):
        args += ["--dir", path]
    for name in (*KEPT, *EMPTIED):
        args += ["--bind", f"{rootfs}/{name}", f"/{name}"]
    for source, target, read_only in mount_points(config):
        args += ["--ro-bind" if read_only else "--bind", source, target]
    return args


def mount_points(config: dict[str, str]) -> Iterator[tuple[str, str, bool]]:
    """The `mpN: SOURCE,mp=TARGET[,ro=1]` lines in order: source, target, read-only."""
    keys = [key for key in config if key[:2] == "mp" and key[2:].isdigit()]
    for key in sorted(keys, key=lambda key: int(key[2:])):
        value, _, flag = config[key].rpartition(",ro=")
        source, _, target = (value or flag).rpartition(",mp=")
        yield source, target, bool(value) and flag == "1"
