"""A way that breaks where it is told to: TCP that cuts, stands still or crawls at a byte of one direction."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 1 << 14


class Wire:
    """Forwards a port of this machine to `target`; `port` is its own.

    `passed` counts the bytes of each direction (`up`: to the host) since the last `heal`.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.rate = 0.0
        self.passed = {"up": 0, "down": 0}
        self._fault: tuple[str, int, str] | None = None
        self._guard = threading.Lock()
        self._open: list[socket.socket] = []
        self._still: set[socket.socket] = set()
        self._refusing = False
        self._hang_ups = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        # What waits here is not on the way any more for the sender's kernel: little, so that slow is slow.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PIECE)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, direction: str, count: int) -> None:
        """Pass `count` bytes of this direction, then break every connection. Later ones are served."""
        self._arm(direction, count, "cut")

    def freeze_at(self, direction: str, count: int) -> None:
        """Pass `count` bytes, then nothing more of the open connections, and no end either."""
        self._arm(direction, count, "freeze")

    def hang_up(self, count: int) -> None:
        """End the next connections, `count` of them, without a word."""
        self.heal()
        self._hang_ups = count

    def freeze(self) -> None:
        """Pass nothing more of what is open now; new connections are served."""
        with self._guard:
            self._still |= set(self._open)

    def heal(self) -> None:
        """Forget every fault, the counts, and the connections that are open."""
        self._fault, self.rate, self._refusing, self._hang_ups = None, 0.0, False, 0
        self.cut()
        with self._guard:
            self.passed = {"up": 0, "down": 0}

    def cut(self, *, refuse: bool = False) -> None:
        """Break what is open now; with `refuse` take nothing new either, until `heal`."""
        self._refusing = refuse
        with self._guard:
            broken, self._open = self._open, []
            still, self._still = self._still, set()
        for end in broken:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            if end in still:  # no thread waits for it any more
                end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    @property
    def fired(self) -> bool:
        """Whether the fault that was armed has happened."""
        return self._fault is None and not self._hang_ups

    def _arm(self, direction: str, count: int, action: str) -> None:
        self.heal()
        self._fault = (direction, count, action)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._refusing or self._hang_ups:
                    self._hang_ups = max(0, self._hang_ups - 1)
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                with self._guard:
                    self._open += [near, far]
                for source, sink, direction in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self._pump, args=(source, sink, direction), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(PIECE)) and source in self._open:
                self._pass(data, source, sink, direction)
        if source in self._still:  # the other end hears nothing of this one's end
            return
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()  # the other direction's thread closes the other end

    def _pass(self, data: bytes, source: socket.socket, sink: socket.socket, direction: str) -> None:
        if source in self._still:
            return
        if self.rate:
            time.sleep(len(data) / self.rate)
        with self._guard:
            if source not in self._open:  # cut meanwhile: what comes next is another connection's
                return
            fault, before = self._fault, self.passed[direction]
            hit = fault is not None and fault[0] == direction and before + len(data) >= fault[1]
            data = data[: max(0, fault[1] - before)] if fault and hit else data
            self.passed[direction] += len(data)
            self._fault = None if hit else fault
        sink.sendall(data)
        if fault and hit:
            if fault[2] == "cut":
                self.cut()
            else:
                self.freeze()
