"""Which hops lead to a box's host: inventory.yaml and ssh_config as plain data, before anything is opened."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from pathlib import Path

import paramiko

from controller.endpoint import Endpoint
from controller.errors import LoginRefused, Unreachable, Usage

# The first value of a key counts, so the person's own file comes first.
CONFIGS = ("~/.ssh/config", "/etc/ssh/ssh_config")


@dataclass(frozen=True)
class Hop:
    """One login on the way: the host itself, or a jump host. `command`: a ProxyCommand in place of a socket.

    `timeout_s`: of ssh_config, None where it names none.
    """

    host: str
    port: int
    user: str
    keys: tuple[str, ...]
    command: str | None = None
    timeout_s: float | None = None

    @property
    def where(self) -> str:
        return self.host if self.port == 22 else f"{self.host}:{self.port}"


def route(endpoint: Endpoint) -> list[Hop]:
    """The hops in the order in which they are opened; the last one is the host.

    What the inventory names wins over ssh_config; the embedded box is reached without ssh_config. Raises
    LoginRefused for a key file that is not there, Unreachable for an ssh_config that cannot be read.
    """
    keys = _identity(endpoint)
    config = paramiko.SSHConfig()
    if not endpoint.embedded:
        _read(config)
    found = _lookup(config, endpoint.host)
    jumps = endpoint.proxy_jump or found.get("proxyjump") or "none"
    names = [] if jumps.lower() == "none" else [name.strip() for name in jumps.split(",")]
    if not endpoint.proxy_jump and any(_parts(name)[1] == endpoint.host for name in names):
        names = []  # `Host *` with a ProxyJump, and this is the jump host itself
    command = found.get("proxycommand")
    direct = not names and command and command.lower() != "none"
    hops = [_jump(config, name, keys) for name in names]
    host = Hop(
        host=found.get("hostname", endpoint.host),
        port=endpoint.port or _port(found, endpoint.host),
        user=endpoint.user or found.get("user", "root"),
        keys=_usable(keys, found),
        command=command if direct else None,
        timeout_s=_seconds(found.get("connecttimeout")),
    )
    return [*hops, host]


def _jump(config: paramiko.SSHConfig, name: str, keys: list[str]) -> Hop:
    """A jump host as `ssh -J` reads it: without a name for the login it is one's own."""
    user, host, port = _parts(name)
    found = _lookup(config, host)
    return Hop(
        host=found.get("hostname", host),
        port=port or _port(found, host),
        user=user or found.get("user") or getpass.getuser(),
        keys=_usable(keys, found),
        timeout_s=_seconds(found.get("connecttimeout")),
    )


def _parts(name: str) -> tuple[str, str, int | None]:
    """`user@host:port`, a user and a port or not; an IPv6 address with a port stands in brackets."""
    user, _, place = name.rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return user, place.strip("[]"), None
    if not port.isdigit():
        raise Usage(f"jump host '{name}': '{port}' is no port", "proxy_jump: [user@]host[:port]")
    return user, host.strip("[]"), int(port)


def _read(config: paramiko.SSHConfig) -> None:
    for name in CONFIGS:
        path = Path(name).expanduser()
        try:
            if path.is_file():
                with path.open(encoding="utf-8", errors="replace") as file:
                    config.parse(file)
        except (OSError, paramiko.SSHException) as error:
            raise Unreachable(f"{name} cannot be read: {error}", "ssh -G HOST names the line") from None


def _lookup(config: paramiko.SSHConfig, host: str) -> dict[str, str]:
    try:
        return dict(config.lookup(host))
    except (OSError, ValueError, paramiko.SSHException) as error:
        raise Unreachable(f"ssh_config says nothing usable of {host}: {error}", f"ssh -G {host}") from None


def _identity(endpoint: Endpoint) -> list[str]:
    if not endpoint.identity_file:
        return []
    path = Path(endpoint.identity_file).expanduser()
    if not path.is_file():
        raise LoginRefused(f"no key file {path}", "check identity_file: in inventory.yaml")
    return [str(path)]


def _usable(keys: list[str], found: dict[str, str]) -> tuple[str, ...]:
    """Those of the inventory, then those of ssh_config; Paramiko breaks on one that is missing."""
    return (*keys, *(key for key in found.get("identityfile", ()) if Path(key).is_file()))


def _port(found: dict[str, str], host: str) -> int:
    port = found.get("port", "22")
    if not port.isdigit():
        raise Unreachable(f"ssh_config names no port for {host}: '{port}'", f"ssh -G {host}")
    return int(port)


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() and int(text) else None
