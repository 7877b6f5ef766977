"""How long we are willing to wait, as one value, so that no wait is ever without an end by accident."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """Seconds.

    `connect`: each of TCP, key exchange, login, and every channel that is opened (Paramiko's limit: 3600).
    `idle`:    silence of the peer, keepalive answers included, after which it counts as gone.
    `begin`:   until the other side says its first word. A suspended container lets `pct exec` in and then
               says nothing until it is resumed, which no keepalive tells.
    `total`:   one whole call, or None where the work decides (a stop has its grace, `--follow` no end).
    """

    connect: float = 15.0
    idle: float = 20.0
    total: float | None = None
    begin: float = 45.0


DEFAULT = Deadline()
