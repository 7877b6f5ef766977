"""The second engine: a container of Debian's LXC, so that what runs in it meets parts that nobody here wrote.

As on a Proxmox host, LXC's monitor has a mount name space of its own, in which a hook binds the mount points
before the container starts: the bound folders need not be open to the container's users, and nothing stays
mounted when it is gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

from . import bubble, lxc_programs
from .host import Failure, Host, read_pairs

FIRST_ID, IDS = 100_000, 65_536  # Proxmox's own range for unprivileged containers
CONFIG = """\
lxc.arch = linux64
lxc.init.cmd = /sbin/init
lxc.apparmor.profile = unconfined
lxc.monitor.unshare = 1
lxc.net.0.type = empty
lxc.tty.max = 2
lxc.pty.max = 1024
lxc.environment = TERM=linux
lxc.mount.auto = cgroup:mixed:force proc:mixed sys:mixed
lxc.mount.entry = tmpfs dev/shm tmpfs rw,nosuid,nodev,mode=1777,create=dir 0 0
lxc.mount.entry = tmpfs run tmpfs rw,nosuid,nodev,mode=755,create=dir 0 0
"""


def start(host: Host, vmid: int, config: dict[str, str]) -> None:
    """Start container `vmid`; returns when LXC says that it runs. It outlives this process."""
    place = f"{host.lxc_path}/{vmid}"
    unprivileged = config.get("unprivileged") == "1"
    provision(host, vmid, unprivileged)
    os.umask(0o022)
    os.makedirs(f"{place}/root", exist_ok=True)
    owner = FIRST_ID if unprivileged else 0
    _write(f"{place}/prestart", _hook(host.rootfs(vmid), config, f"{place}/root", owner), 0o755)
    _write(f"{place}/config", _config(host, vmid, config, unprivileged), 0o644)
    log_path = f"{place}/start.log"
    _write(log_path, "", 0o644)
    program = shutil.which("lxc-start")
    if program is None:
        raise Failure(255, f"startup for container '{vmid}' failed: there is no lxc-start")
    done = subprocess.run(
        [program, "-P", host.lxc_path, "-n", str(vmid), "-d", "-o", log_path, "-l", "WARN"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        umask=0o022,
        # Where LXC finds `newuidmap` it wants root in /etc/subuid; without it root writes the map itself.
        env={"PATH": "/nonexistent", "LC_ALL": "C"},
    )
    if done.returncode != 0:
        raise Failure(255, f"startup for container '{vmid}' failed: {reason(log_path)}")


def end(host: Host, vmid: int, clean_s: float, force: bool) -> None:
    """End a running container: ask its init first when `clean_s` > 0, kill when `force`."""
    ended = False
    if clean_s > 0:
        asked = ("--nokill", "--timeout", str(int(clean_s)))
        ended = lxc_programs.call(host.lxc_path, "lxc-stop", vmid, *asked).returncode == 0
    if not ended and force:
        ended = lxc_programs.call(host.lxc_path, "lxc-stop", vmid, "--kill").returncode == 0
    if not ended:
        raise Failure(255, f"CT {vmid} did not stop: got timeout")


def attach(host: Host, vmid: int, argv: list[bytes], env: dict[bytes, bytes], keep_env: bool) -> None:
    """Become lxc-attach, as pct does; does not return. Streams, terminal and status are its own from here."""
    keep = b"--keep-env" if keep_env else b"--clear-env"
    head = [b"lxc-attach", b"-P", os.fsencode(host.lxc_path), b"-n", str(vmid).encode(), keep, b"--"]
    try:
        os.execvpe(b"lxc-attach", [*head, *argv], env)
    except FileNotFoundError:
        raise Failure(255, "there is no lxc-attach on this host") from None


def provision(host: Host, vmid: int, unprivileged: bool) -> None:
    """Give the container a root of its own: a copy of what `sandbox.up` has built, ids moved if need be."""
    rootfs = host.rootfs(vmid)
    if os.path.isdir(rootfs):
        return
    base = read_pairs(host.settings).get("base", "")
    draft = f"{rootfs}.incoming"
    bubble.clear(draft)
    os.makedirs(os.path.dirname(rootfs), exist_ok=True)
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "--", base, draft],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        raise Failure(255, f"no root for container '{vmid}': {done.stderr.strip()}")
    if unprivileged:
        move_ids(draft)
    os.rename(draft, rootfs)


def move_ids(tree: str) -> None:
    """Add FIRST_ID to owner and group of everything under `tree`; a set-id bit outlives the change."""
    for parent, folders, files in os.walk(tree):
        for path in (parent, *(f"{parent}/{name}" for name in files), *_links(parent, folders)):
            facts = os.lstat(path)
            if facts.st_uid >= FIRST_ID:  # a second name of a file that is done
                continue
            os.lchown(path, FIRST_ID + facts.st_uid, FIRST_ID + facts.st_gid)
            if facts.st_mode & 0o6000 and not os.path.islink(path):
                os.chmod(path, facts.st_mode & 0o7777)


def _links(parent: str, folders: list[str]) -> list[str]:
    """Links to folders, which os.walk lists as folders and does not enter."""
    return [path for path in (f"{parent}/{name}" for name in folders) if os.path.islink(path)]


def _config(host: Host, vmid: int, config: dict[str, str], unprivileged: bool) -> str:
    lines = [
        f"lxc.uts.name = {config.get('hostname', f'ct{vmid}')}",
        f"lxc.rootfs.path = dir:{host.lxc_path}/{vmid}/root",
    ]
    lines.append(f"lxc.hook.pre-start = {host.lxc_path}/{vmid}/prestart")
    if unprivileged:
        lines += [f"lxc.idmap = {kind} 0 {FIRST_ID} {IDS}" for kind in "ug"]
    raw = [f"{key} = {value}" for key, value in config.items() if key.startswith("lxc.")]
    return CONFIG + "\n".join([*lines, *raw, ""])


def _hook(rootfs: str, config: dict[str, str], stage: str, owner: int) -> str:
    """A shell script for LXC's monitor, in whose mount name space the root appears on `stage`."""
    lines = ["#!/bin/sh -e", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    # Before the mount points, as LXC would do it after them: a clone in /tmp has its interpreter there.
    options = f"rw,nosuid,nodev,mode=1777,uid={owner},gid={owner}"
    lines.append(f"mount -t tmpfs -o {options} tmpfs {shlex.quote(rootfs + '/tmp')}")
    for source, target, read_only in bubble.mount_points(config):
        inner = shlex.quote(rootfs + target)
        lines += [f"mkdir -p {inner}", f"mount --bind {shlex.quote(source)} {inner}"]
        if read_only:
            lines.append(f"mount -o remount,bind,ro {inner}")
    lines.append(f"mount --rbind {shlex.quote(rootfs)} {stage}")
    return "\n".join([*lines, ""])


def _write(path: str, text: str, mode: int) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.chmod(path, mode)


def reason(log_path: str) -> str:
    """The first error that LXC logged, without its clock and source line."""
    with open(log_path, encoding="utf-8", errors="replace") as file:
        errors = [line.rpartition(" - ")[2].strip() for line in file if " ERROR " in line]
    return errors[0] if errors else f"see {log_path}"
