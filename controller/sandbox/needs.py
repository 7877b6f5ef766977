"""Checks what the sandbox needs from the machine, and says in one line how to get it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import SandboxError
from .pct import lxc
from .pct.host import BUBBLEWRAP, LXC

LXC_PACKAGES = {"lxc-start": "lxc", "debootstrap": "debootstrap", "/usr/sbin/sshd": "openssh-server"}
STATIC_INIT = Path("/usr/sbin/init.lxc.static")  # of Debian's package; it ends at once, having nothing to run
PROBE = """\
lxc.rootfs.path = dir:{root}
lxc.init.cmd = /sbin/init
lxc.apparmor.profile = unconfined
lxc.monitor.unshare = 1
lxc.net.0.type = empty
"""
PACKAGES = {"bwrap": "bubblewrap", "tmux": "tmux", "bash": "bash"}
USERNS_SWITCHES = (  # file, the value that forbids, the line that allows
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    ("/proc/sys/user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=10000"),
)


def check(engine: str = BUBBLEWRAP) -> None:
    """Raise SandboxError unless programs, the SSH library and the rights for the engine are there."""
    if engine == LXC:
        _check_lxc()
        return
    _check_programs(PACKAGES)
    _check_library()
    _check_user_spaces()


def _check_lxc() -> None:
    if os.geteuid() != 0:
        raise SandboxError(
            "--engine lxc needs root: it runs Debian's LXC as a Proxmox host does",
            "run it as root, or leave --engine out",
        )
    _check_programs(LXC_PACKAGES)
    _check_library()
    _check_lxc_starts()
    lines = Path("/proc/self/uid_map").read_text("ascii").splitlines()
    ranges = [(int(inner), int(count)) for inner, _, count in (line.split() for line in lines)]
    last = lxc.FIRST_ID + lxc.IDS
    if not any(inner <= lxc.FIRST_ID and last <= inner + count for inner, count in ranges):
        raise SandboxError(
            f"root has no ids from {lxc.FIRST_ID} on to give to an unprivileged container",
            "inside Docker: without userns-remap",
        )


def _check_lxc_starts() -> None:
    """The least container there is, whose failure is the machine's and not ours. It has a root of its own:
    with none and no console, LXC changes the mode of the machine's /dev/null."""
    if not STATIC_INIT.exists():
        return
    with tempfile.TemporaryDirectory(prefix="pctrun-probe-", ignore_cleanup_errors=True) as place:
        root, log = Path(place, "root"), Path(place, "log")
        for name in ("dev", "proc", "sys", "sbin"):
            (root / name).mkdir(parents=True)
        shutil.copy(STATIC_INIT, root / "sbin" / "init")
        Path(place, "probe").mkdir()
        Path(place, "probe", "config").write_text(PROBE.format(root=root))
        log.touch()
        command = ["lxc-start", "-P", place, "-n", "probe", "-d", "-o", str(log), "-l", "ERROR"]
        if subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode != 0:
            raise SandboxError(
                f"LXC starts no container on this machine: {lxc.reason(str(log))}",
                "inside Docker: docker run --privileged",
            )


def _check_programs(packages: dict[str, str]) -> None:
    missing = [packages[name] for name in packages if shutil.which(name) is None]
    if missing:
        raise SandboxError(
            f"the sandbox needs {' and '.join(missing)}, which this machine has not",
            f"sudo apt-get install -y {' '.join(missing)}",
        )


def _check_library() -> None:
    if importlib.util.find_spec("asyncssh") is None:
        raise SandboxError("the sandbox needs the Python package asyncssh", "pip install 'pctrun[sandbox]'")


def _check_user_spaces() -> None:
    probe = subprocess.run(
        [
            "bwrap",
            "--unshare-user",
            "--unshare-pid",
            "--uid",
            "0",
            "--ro-bind",
            "/",
            "/",
            "--proc",
            "/proc",
            "true",
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if probe.returncode != 0:
        reason = probe.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise SandboxError(
            f"this machine does not let bubblewrap make a container: {reason[0]}", userns_hint()
        )


def userns_hint() -> str:
    """The line that allows user name spaces, as far as the kernel's switches tell."""
    for path, forbids, mend in USERNS_SWITCHES:
        try:
            if Path(path).read_text().strip() == forbids:
                return mend
        except OSError:
            continue
    docker = " ".join(f"--security-opt {name}=unconfined" for name in ("seccomp", "apparmor", "systempaths"))
    return f"allow user name spaces; inside Docker: {docker}"
