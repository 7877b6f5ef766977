"""Host keys are checked before anything is sent: pinned, or known; there is no trust on first use."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import paramiko

from controller.errors import HostKeyRefused


def fingerprint(key: paramiko.PKey) -> str:
    """As `ssh-keygen -lf` prints it: SHA256:<base64 without padding>."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode("ascii").rstrip("=")


class _Pinned(paramiko.MissingHostKeyPolicy):
    def __init__(self, pin: str) -> None:
        self.pin = pin.rstrip("=")

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        seen = fingerprint(key)
        if seen != self.pin:
            raise HostKeyRefused(
                f"the host key of {hostname} is not the pinned one: {seen}, pinned {self.pin}",
                "if the host was reinstalled, compare on its console: "
                "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; then change host_key: in inventory.yaml",
            )


class _Known(paramiko.MissingHostKeyPolicy):
    def __init__(self, path: Path) -> None:
        self.path = path

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise HostKeyRefused(
            f"the host key of {hostname} is not known: it shows {fingerprint(key)} ({key.get_name()})",
            f"compare it on the host's console: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; then "
            f"{_keyscan(hostname)} >> {self.path}, or set host_key: {fingerprint(key)} in inventory.yaml",
        )


def guard(client: paramiko.SSHClient, *, known_hosts: str, pin: str | None) -> None:
    """Let `client` accept only the pinned key, or those of `known_hosts`; call before it connects."""
    if pin:
        client.set_missing_host_key_policy(_Pinned(pin))
        return
    path = Path(known_hosts).expanduser()
    if path.is_file():
        client.load_system_host_keys(str(path))
    client.set_missing_host_key_policy(_Known(path))


def changed(error: paramiko.BadHostKeyException, known_hosts: str, port: int) -> HostKeyRefused:
    """The key differs from the recorded one: a reinstalled host, or somebody between us and it."""
    name = error.hostname if port == 22 else f"[{error.hostname}]:{port}"  # as known_hosts has it
    return HostKeyRefused(
        f"the host key of {name} has changed: it shows {fingerprint(error.key)}, "
        f"{known_hosts} has {fingerprint(error.expected_key)}",
        f"somebody may be in between. If the host was reinstalled: ssh-keygen -R '{name}' "
        f"-f {known_hosts}, then add the new key after comparing it on the host's console",
    )


def _keyscan(hostname: str) -> str:
    """`hostname` is Paramiko's `host` or `[host]:port`."""
    if hostname.startswith("["):
        host, _, port = hostname[1:].partition("]:")
        return f"ssh-keyscan -p {port} {host}"
    return f"ssh-keyscan {hostname}"
