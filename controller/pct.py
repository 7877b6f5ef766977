"""The one argument list that reaches into a container, and what it means when `pct` itself refuses.

Facts of pve-container 6.1 (PVE 9): options are permuted, so `--` is a must; it dies with errno as its
status, so 2 and 255 may be a child's as well: only the missing end frame and the words on stderr tell.
"""

from __future__ import annotations

import shlex

from controller import embedded
from controller.endpoint import Endpoint
from controller.errors import (
    AgentFailed,
    ConnectionLost,
    NotRunning,
    PctRefused,
    PctrunError,
    PreflightFailed,
)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# One ASCII line: non-ASCII arguments are destroyed when the host's session runs in the C locale.
BOOT = (
    "import sys,zlib;i=sys.stdin.buffer;"
    "exec(compile(zlib.decompress(i.read(int(i.readline()))),'<pctrun agent>','exec'))"
)


def argv(endpoint: Endpoint) -> list[str]:
    """The host's argument list: the agent's Python in a clean environment, its program to come on stdin."""
    sudo = ["sudo", "-n"] if endpoint.sudo else []
    clean = ["/usr/bin/env", "-i", f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8", "LC_ALL=C.UTF-8"]
    python = [endpoint.agent_python, "-I", "-c", BOOT]
    return [*sudo, "pct", "exec", str(endpoint.vmid), "--", *clean, *python]


def command(endpoint: Endpoint) -> str:
    """The same for the SSH login shell, the only shell in the path."""
    return shlex.join(argv(endpoint))


def start_mend(endpoint: Endpoint) -> str:
    """What brings a container up that is off; `sandbox.up` starts those of the embedded box that are used."""
    if not endpoint.embedded:
        return f"on {endpoint.host}: pct start {endpoint.vmid}"
    return "invoke sandbox.up" if embedded.starts(endpoint.vmid) else embedded.pct_start(endpoint.vmid)


def explain(endpoint: Endpoint, status: int | None, stderr: str, stdout: str = "") -> PctrunError:
    """Why there was no end frame, in one line. `status` is None when the channel ended without one."""
    said = f"{stderr}\n{stdout}"
    words = said.lower()
    vmid, host = endpoint.vmid, endpoint.host

    def seen(*needles: str) -> bool:
        return all(needle in words for needle in needles)

    if status is None:
        return ConnectionLost(
            f"the connection to {host} ended before the answer came",
            "the agent may still have done its work: look with `invoke status`",
        )
    if seen("not running") and status == 255:
        return NotRunning(
            f"container {vmid} on {host} is not running",
            start_mend(endpoint),
            kind="container-stopped",
        )
    if seen("configuration file", "does not exist"):
        return PctRefused(
            f"container {vmid} does not exist on {host} (or lives on another node of the cluster)",
            "pvesh get /cluster/resources --type vm names its node: set host: in inventory.yaml to that",
        )
    if seen("sudo:") and (
        seen("password is required") or seen("terminal is required") or seen("not allowed")
    ):
        return PctRefused(
            f"sudo on {host} wants a password for pct",
            f"in {host}:/etc/sudoers.d/pctrun: {endpoint.user or 'USER'} ALL=(root) NOPASSWD: /usr/sbin/pct",
        )
    if seen("sudo", "command not found"):
        return PctRefused(
            f"there is no sudo on {host}", "log in as root, or install sudo there; sudo: in inventory.yaml"
        )
    if status == 127 and (seen("pct: command not found") or seen("pct: not found") or seen("pct", "no such")):
        return PctRefused(
            f"there is no pct on {host}: it is not a Proxmox host, or pct is not on the PATH of this login",
            "check host: in inventory.yaml",
        )
    if status in (126, 127) and (seen("failed to exec") or seen("no such file") or seen("permission denied")):
        return PreflightFailed(
            f"container {vmid} has no {endpoint.agent_python} that runs",
            f"on {host}: pct exec {vmid} -- apt-get install -y python3, or set agent_python:",
            kind="no-python",
        )
    if seen("unknown option") or seen("unable to parse option") or seen("parameter verification failed"):
        return PctRefused(
            f"pct on {host} refused its own arguments: {_last_line(said)}",
            "check vmid: in inventory.yaml (100 or more)",
        )
    if (
        seen("ipcc_send_rec")
        or seen("access control")
        or seen("permission denied")
        or seen("need to be root")
    ):
        return PctRefused(
            f"pct on {host} must run as root: {_last_line(said)}",
            "log in as root, or set sudo: true in inventory.yaml",
        )
    if status in (137, 143):  # a stop kills all that is in a container, a shutdown and a reboot ask first
        how = "ended: it is shut down, or `invoke unlock` was typed elsewhere"
        if status == 137:
            how = "killed: it was stopped, or had no memory left"
        return ConnectionLost(
            f"the agent in container {vmid} was {how}", f"on {host}: pct status {vmid}; dmesg | tail"
        )
    return AgentFailed(
        f"the agent in container {vmid} ended with status {status} and no answer: {_last_line(said)}",
        "",
        evidence=said.strip().splitlines()[-12:],
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
