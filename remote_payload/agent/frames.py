"""One byte stream carries progress, raw output and the answer, and foreign bytes can be told from ours.

A frame is `@pctrun <nonce> <kind> <length>\\n`, `length` bytes, `\\n`. Under `pct exec` SIGPIPE is ignored in
every process, so a reader that left shows only as EPIPE, or as POLLERR before anything is written.
"""

from __future__ import annotations

import json
import os
import select
from typing import Any


class ReaderGone(Exception):
    """Nobody reads our output any more: a verb that only reports may end."""


class Frames:
    """Notes and the end never raise: a change must not stop half-way because its reader left."""

    def __init__(self, fd: int, nonce: str) -> None:
        self._fd = fd
        self._nonce = nonce
        self._gone = False
        self._poll = select.poll()
        self._poll.register(fd, 0)  # POLLERR and POLLHUP are always reported

    def note(self, text: str, **facts: Any) -> None:
        """Progress: one line for a person."""
        self._quietly("note", {"text": text, **facts})

    def part(self, document: dict[str, Any]) -> None:
        """A piece of the answer that cannot wait for its end; raises ReaderGone as `out` does."""
        self._send("part", json.dumps(document).encode())

    def out(self, data: bytes) -> None:
        self._send("out", data)

    def err(self, data: bytes) -> None:
        self._send("err", data)

    def end(self, verb: str, result: dict[str, Any]) -> None:
        self._quietly("end", {"schema": 1, "verb": verb, "ok": True, "result": result})

    def fail(self, verb: str, error: dict[str, Any]) -> None:
        self._quietly("end", {"schema": 1, "verb": verb, "ok": False, "error": error})

    def gone(self) -> bool:
        """Whether the reader has left; costs one poll of no wait."""
        if not self._gone:
            self._gone = bool(self._poll.poll(0))
        return self._gone

    def _quietly(self, kind: str, body: dict[str, Any]) -> None:
        try:
            self._send(kind, json.dumps(body).encode())
        except ReaderGone:
            pass

    def _send(self, kind: str, data: bytes) -> None:
        if self._gone:
            raise ReaderGone
        parts = [
            memoryview(f"@pctrun {self._nonce} {kind} {len(data)}\n".encode()),
            memoryview(data),
            memoryview(b"\n"),
        ]
        try:
            write_all(self._fd, parts)
        except OSError as error:
            self._gone = True
            raise ReaderGone from error


def write_all(fd: int, parts: list[memoryview]) -> None:
    """Write every part, also to a descriptor that some other holder has made non-blocking."""
    parts = [part for part in parts if part]
    while parts:
        try:
            written = os.writev(fd, parts)
        except BlockingIOError:
            select.select([], [fd], [])
            continue
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:
            parts[0] = parts[0][written:]
