"""Host keys are checked before anything is sent: pinned, or known; there is no trust on first use.

known_hosts is read here, for one host: Paramiko makes a key of every line and compares it with all before it,
which takes 0.3 s of CPU for a file of 1,200 lines, and stops at a line that is damaged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator
from pathlib import Path

import paramiko

from controller.errors import HostKeyRefused


class Policy(paramiko.MissingHostKeyPolicy):
    """What a host may show. Paramiko knows no host keys, so it asks here about every one.

    `kinds`: types of the keys that are known, to be asked for first (a host has several).
    """

    def __init__(self, host: str, port: int, *, known_hosts: str, pin: str | None) -> None:
        self.name = host if port == 22 else f"[{host}]:{port}"  # as known_hosts has it
        self.pin = pin.rstrip("=") if pin else None
        self.known_hosts = known_hosts
        self.keys = {} if pin else _known(Path(known_hosts).expanduser(), self.name)
        self.kinds = frozenset(self.keys.values())

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        seen = fingerprint(key.asbytes())
        if self.pin:
            if seen != self.pin:
                raise self._not_pinned(seen)
        elif key.asbytes() not in self.keys:
            raise self._changed(seen) if self.keys else self._unknown(seen, key.get_name())

    def _not_pinned(self, seen: str) -> HostKeyRefused:
        return HostKeyRefused(
            f"the host key of {self.name} is not the pinned one: {seen}, pinned {self.pin}",
            "if the host was reinstalled, compare on its console: "
            "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; then change host_key: in inventory.yaml",
        )

    def _unknown(self, seen: str, kind: str) -> HostKeyRefused:
        path = Path(self.known_hosts).expanduser()
        return HostKeyRefused(
            f"the host key of {self.name} is not known: it shows {seen} ({kind})",
            f"compare it on the host's console: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; then "
            f"{_keyscan(self.name)} >> {path}, or set host_key: {seen} in inventory.yaml",
        )

    def _changed(self, seen: str) -> HostKeyRefused:
        """A reinstalled host, or somebody between us and it."""
        expected = fingerprint(next(iter(self.keys)))
        return HostKeyRefused(
            f"the host key of {self.name} has changed: it shows {seen}, {self.known_hosts} has {expected}",
            f"somebody may be in between. If the host was reinstalled: ssh-keygen -R '{self.name}' "
            f"-f {self.known_hosts}, then add the new key after comparing it on the host's console",
        )


def fingerprint(key: bytes) -> str:
    """As `ssh-keygen -lf` prints it: SHA256:<base64 without padding>."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode("ascii").rstrip("=")


def _known(path: Path, name: str) -> dict[bytes, str]:
    """The keys that a known_hosts file has for this name and does not revoke, with their types."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return {}
    keys: dict[bytes, str] = {}
    revoked = set()
    for marker, kind, key in _entries(text, name):
        if marker == "@revoked":
            revoked.add(key)
        elif not marker:  # a @cert-authority vouches for certificates, which Paramiko does not check
            keys[key] = kind
    return {key: kind for key, kind in keys.items() if key not in revoked}


def _entries(text: str, name: str) -> Iterator[tuple[str, str, bytes]]:
    """Marker, type and key of each line that is about `name`; a damaged one is none, as for OpenSSH."""
    for line in text.splitlines():
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) >= 3 and _is_about(fields[0], name):
            try:
                yield marker, fields[1], base64.b64decode(fields[2], validate=True)
            except ValueError:
                continue


def _is_about(patterns: str, name: str) -> bool:
    found = False
    for pattern in patterns.split(","):
        if pattern.startswith("|1|"):
            found |= _is_hash_of(pattern, name)
            continue
        bare = pattern.removeprefix("!").lower()
        if bare == name.lower() or (("*" in bare or "?" in bare) and _matches(bare, name.lower())):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _matches(pattern: str, name: str) -> bool:
    """`*` and `?` alone mean more than themselves: brackets stand around a host that has a port."""
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name))


def _is_hash_of(pattern: str, name: str) -> bool:
    """`|1|salt|HMAC-SHA1`, as HashKnownHosts writes it."""
    try:
        salt, digest = (base64.b64decode(part) for part in pattern[3:].split("|"))
    except ValueError:
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def _keyscan(name: str) -> str:
    """`name` is `host` or `[host]:port`."""
    if name.startswith("["):
        host, _, port = name[1:].partition("]:")
        return f"ssh-keyscan -p {port} {host}"
    return f"ssh-keyscan {name}"
