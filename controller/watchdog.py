"""Notice a peer that is gone without a word; Paramiko's own keepalive asks and never looks for the answer."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import sys
import termios
import threading
import time

import paramiko


class Watchdog:
    """Asks the peer for a sign of life, and closes the transport once it has given none for `idle` seconds.

    Any byte of the peer is a sign (`heard`), and so is its kernel taking bytes of ours: on a slow way the
    question waits behind megabytes that are sent already. Closing wakes every wait of Paramiko, also one
    without a limit of its own, such as that for the answer to an exec request.
    """

    def __init__(self, transport: paramiko.Transport, *, idle: float) -> None:
        self.dead = False
        self._transport = transport
        self._idle = idle
        self._interval = min(5.0, idle / 3)
        self._heard_at = time.monotonic()
        self._asked_at: float | None = None
        self._stop = threading.Event()
        for work in (self._ask, self._watch):
            threading.Thread(target=work, name="pctrun-watchdog", daemon=True).start()

    def heard(self) -> None:
        """The peer has just proved that it lives."""
        self._heard_at = time.monotonic()

    def stop(self) -> None:
        self._stop.set()

    def _ask(self) -> None:
        while not self._stop.wait(self._interval) and self._transport.is_active():
            self._asked_at = time.monotonic()
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                # Blocks until the answer, a refusal included, or the end of the transport.
                self._transport.global_request("keepalive@openssh.com", wait=True)
                self._asked_at = None

    def _watch(self) -> None:
        before = self._on_the_way()
        while not self._stop.wait(self._interval / 8) and self._transport.is_active():
            now = self._on_the_way()
            if now < before:
                self.heard()
            before = now
            asked = self._asked_at
            if asked is not None and time.monotonic() - max(asked, self._heard_at) > self._idle:
                self.dead = True
                self._transport.close()

    def _on_the_way(self) -> int:
        """Bytes that we have sent and the peer's kernel has not acknowledged; 0 behind a jump host."""
        line = self._transport.sock
        if not isinstance(line, socket.socket):
            return 0
        try:
            return int.from_bytes(fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except (OSError, ValueError):  # closed meanwhile
            return 0
