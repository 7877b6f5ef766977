"""Reach a box's host through its jump hosts: every host key checked, every failure named with its hop."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import socket
import time
from typing import Any

import paramiko

from controller import hostkeys, logins
from controller.deadline import Deadline
from controller.endpoint import Endpoint
from controller.errors import LoginRefused, Unreachable
from controller.route import Hop, route

# Without a handler Python prints Paramiko's errors, tracebacks included; what matters of them is in our own.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _Relay(paramiko.ProxyCommand):
    """A ProxyCommand that is waited for. Paramiko's own close kills by number, whoever has it by then."""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Close its pipes, once nobody reads them any more."""
        self.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class Way:
    """The open connections to a host: its jump hosts', then its own, each through the one before it."""

    def __init__(self) -> None:
        self._clients: list[paramiko.SSHClient] = []
        self._relay: _Relay | None = None

    @property
    def transport(self) -> paramiko.Transport:
        """That of the last hop."""
        transport = self._clients[-1].get_transport()
        assert transport is not None  # it has been connected
        return transport

    def extend(self, hop: Hop, pin: str | None, endpoint: Endpoint, deadline: Deadline) -> None:
        """Open one more hop, whose host key is pinned or else known; raises what Paramiko raises."""
        limit = hop.timeout_s or deadline.connect
        sock: Any = None
        if hop.command:
            sock = self._relay = _Relay(hop.command)
        elif self._clients:
            through = self.transport
            sock = through.open_channel("direct-tcpip", (hop.host, hop.port), ("", 0), timeout=limit)
        client, policy = (
            paramiko.SSHClient(),
            hostkeys.Policy(hop.host, hop.port, known_hosts=endpoint.known_hosts, pin=pin),
        )
        client.set_missing_host_key_policy(policy)
        try:
            client.connect(
                hop.host,
                hop.port,
                hop.user,
                sock=sock,
                timeout=limit,
                banner_timeout=deadline.connect,
                auth_timeout=deadline.connect,
                key_filename=list(hop.keys),  # type: ignore[arg-type]  # the stubs know one; it takes a list
                allow_agent=not endpoint.embedded,
                look_for_keys=not endpoint.identity_file,
                transport_factory=functools.partial(_transport, policy.kinds),
            )
        except BaseException as error:
            transport = client.get_transport()
            client.close()
            self._forget_relay()  # a ProxyCommand is the first hop and the last
            if _is_of_the_way(error) and transport is not None and not transport.remote_version:
                raise _WithoutAWord from error
            raise
        self._clients.append(client)

    def close(self) -> None:
        for client in reversed(self._clients):
            client.close()
        self._forget_relay()

    def _forget_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.forget()


class _WithoutAWord(EOFError):
    """The host, or the way, ended the connection before the server had named itself."""


def dial(endpoint: Endpoint, deadline: Deadline) -> Way:
    """Connect, jump hosts first; each is checked and each failure names the hop that failed."""
    way, hops = Way(), route(endpoint)
    for hop in hops:
        pin = endpoint.host_key if hop is hops[-1] else None
        try:
            _open(way, hop, pin, endpoint, deadline)
        except BaseException:
            way.close()
            raise
    return way


def _open(way: Way, hop: Hop, pin: str | None, endpoint: Endpoint, deadline: Deadline) -> None:
    """Open one hop in its turn, and again when its host hung up without a word: it does that, and to nobody
    who has begun to log in, while too many do (`logins.AT_ONCE`)."""
    limit, gives_up_at = hop.timeout_s or deadline.connect, math.inf
    for tried in itertools.count(1):
        began = time.monotonic()
        try:
            with logins.door(hop.host, hop.port).passing(limit):
                began = time.monotonic()
                gives_up_at = min(gives_up_at, began + limit)
                way.extend(hop, pin, endpoint, deadline)
            return
        except BaseException as error:
            now, pause = time.monotonic(), logins.pause(tried)
            again = isinstance(error, _WithoutAWord) and tried < logins.TRIES and now + pause < gives_up_at
            if not again:
                raise _open_failure(hop, error, endpoint, deadline, now - began) from None
        time.sleep(pause)


def _open_failure(
    hop: Hop, error: BaseException, endpoint: Endpoint, deadline: Deadline, waited: float
) -> BaseException:
    """What a failure to open means; one that is none of the network's or of SSH's is returned as it is."""
    where, limit = hop.where, hop.timeout_s or deadline.connect
    if _is_of_the_way(error):
        silent = f"it does not answer within {limit:g} s"
        why = silent if waited >= limit else "the connection broke before the login was done"
        return Unreachable(f"cannot reach {where}: {why}", "is it up, is the way free?")
    key_mend = "add your public key to its authorized_keys, or set user: or identity_file: in inventory.yaml"
    match error:
        case paramiko.PasswordRequiredException():
            return LoginRefused(f"the key for {where} has a passphrase", "ssh-add it to an agent first")
        case paramiko.AuthenticationException():
            return LoginRefused(f"{where} refused the login of {hop.user}: {error}", key_mend)
        case paramiko.SSHException() if "No authentication methods" in str(error):
            return LoginRefused(f"there is no key to offer to {where} for {hop.user}", key_mend)
        case socket.gaierror():
            return Unreachable(f"no such host name: {hop.host}", "check host: in inventory.yaml")
        case TimeoutError():
            return Unreachable(f"{where} does not answer within {limit:g} s", "is it up, is the way free?")
        case paramiko.ssh_exception.NoValidConnectionsError():
            return Unreachable(f"{where} refuses the connection", "is it up, is port: right?")
        case OSError() | EOFError() | ValueError() | paramiko.SSHException():
            return Unreachable(f"cannot reach {where}: {error or type(error).__name__}")
        case _:
            return error


def _is_of_the_way(error: BaseException) -> bool:
    """A line that broke or fell silent: Paramiko calls it a refused login when it happens in that phase."""
    said = str(error)
    if isinstance(error, paramiko.AuthenticationException):
        return "shut down" in said or "timeout" in said
    lost = isinstance(error, paramiko.SSHException) and said.startswith(("No existing", "Error reading"))
    return lost or isinstance(error, EOFError)


def _transport(kinds: frozenset[str], sock: Any, **options: Any) -> paramiko.Transport:
    """Sent at once, as OpenSSH does. Paramiko leaves Nagle's algorithm on, and then key exchange and login
    wait for a delayed acknowledgement each: 40 ms on Linux. AES-GCM first, which Paramiko offers last:
    a third less CPU than counter mode with a hash, 0.45 s instead of 0.65 for 100 MiB.
    """
    if isinstance(sock, socket.socket):  # not a jump host's channel, not a ProxyCommand
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    transport = paramiko.Transport(sock, **options)
    offered = transport.get_security_options()
    if kinds:  # a known key, where the host has several; an RSA key has one name and signs under two
        offered.key_types = sorted(
            offered.key_types, key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-") else kind) not in kinds
        )
    offered.ciphers = sorted(offered.ciphers, key=lambda name: "gcm" not in name)
    return transport
