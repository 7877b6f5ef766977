"""Where a box really is: a real one says so in the inventory, the embedded one is asked (and started)."""

from __future__ import annotations

from dataclasses import dataclass

from controller import embedded
from controller.errors import Usage
from controller.inventory import Box


@dataclass(frozen=True)
class Endpoint:
    """All that a connection and one `pct exec` need. `user` and `port` None: as ~/.ssh/config says."""

    host: str
    vmid: int
    agent_python: str
    python: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts: str = "~/.ssh/known_hosts"
    host_key: str | None = None
    proxy_jump: str | None = None
    sudo: bool = False
    embedded: bool = False


def resolve(box: Box, *, revive: bool = False) -> Endpoint:
    """The endpoint of `box`.

    A sandbox that was never started is brought up; one that a person took down stays down unless `revive`, so
    that `status` after `sandbox.down` can say unreachable.
    """
    return _sandbox(box, revive=revive) if box.sandbox else _real(box)


def _real(box: Box) -> Endpoint:
    given = box.given
    return Endpoint(
        host=box.host or "",
        vmid=box.vmid,
        agent_python=box.agent_python,
        python=box.python,
        user=box.user if "user" in given else None,
        port=box.port if "port" in given else None,
        identity_file=box.identity_file,
        known_hosts=box.known_hosts,
        host_key=box.host_key,
        proxy_jump=box.proxy_jump,
        sudo=box.sudo,
    )


def _sandbox(box: Box, *, revive: bool) -> Endpoint:
    up = embedded.up(revive=revive)
    if box.vmid not in up.vmids:
        raise Usage(
            f"the sandbox has container {up.vmid}, not {box.vmid}", f"vmid: {up.vmid} in inventory.yaml"
        )
    given = box.given
    return Endpoint(
        host=up.host,
        vmid=box.vmid,
        agent_python=box.agent_python if "agent_python" in given else up.agent_python,
        python=box.python if "python" in given else up.python,
        user=up.user,
        port=up.port,
        identity_file=str(up.identity_file),
        known_hosts=str(embedded.known_hosts(up)),
        host_key=up.host_key,
        embedded=True,
    )
