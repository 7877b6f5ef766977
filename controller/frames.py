"""Frames tell the answer from everything else that lands on stdout: banners, warnings, a child's noise.

Format (docs/architecture.md): `@pctrun <nonce> <kind> <length>\\n`, `length` bytes, `\\n`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from controller.errors import ProtocolError

STREAMED = frozenset({"out", "err"})
_MAX_HEADER = 96
_MAX_DOCUMENT = 64 * 1024 * 1024  # a snapshot is some KiB; more than this is not one of ours


@dataclass(frozen=True)
class Frame:
    """`out` and `err` may come in several pieces; `note` and `end` are whole JSON documents."""

    kind: str
    data: bytes


class FrameParser:
    """Feed it stdout in any chunks; it yields frames and skips bytes that are in none.

    >>> list(FrameParser("ab").feed(b"banner\\n@pctrun ab out 2\\nhi\\n"))
    [Frame(kind='out', data=b'hi')]
    """

    def __init__(self, nonce: str) -> None:
        self._mark = b"@pctrun " + nonce.encode("ascii") + b" "
        self._header = re.compile(rb"([a-z]+) (\d+)\n")
        self._pending = b""  # bytes that may still become a header
        self._kind = ""
        self._left = 0  # bytes of the frame that are still to come, its closing newline included
        self._document: list[bytes] = []
        self.skipped = b""  # the last bytes outside frames, for a message when no end frame comes

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Frames that `chunk` completes or continues."""
        data = self._pending + chunk
        self._pending = b""
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                yield from self._take(piece)
                continue
            start = data.find(self._mark, at)
            if start < 0:
                keep = _partial_suffix(data[at:], self._mark)
                self._skip(data[at : len(data) - keep])
                self._pending = data[len(data) - keep :]
                return
            self._skip(data[at:start])
            header = self._header.match(data, start + len(self._mark))
            if header is None:
                if b"\n" in data[start:] or len(data) - start > _MAX_HEADER:
                    raise ProtocolError(
                        f"malformed frame header from the agent: {data[start : start + _MAX_HEADER]!r}"
                    )
                self._pending = data[start:]
                return
            self._kind = header[1].decode("ascii")
            self._left = int(header[2]) + 1
            if self._kind not in STREAMED and self._left > _MAX_DOCUMENT:
                raise ProtocolError(f"the agent announces a {self._kind} of {header[2].decode()} bytes")
            at = header.end()

    def _take(self, piece: bytes) -> Iterator[Frame]:
        self._left -= len(piece)
        body = piece[:-1] if not self._left else piece  # the last byte of a frame is its newline
        if self._kind in STREAMED:
            if body:
                yield Frame(self._kind, body)
            return
        self._document.append(body)
        if not self._left:
            document, self._document = b"".join(self._document), []
            yield Frame(self._kind, document)

    def _skip(self, data: bytes) -> None:
        self.skipped = (self.skipped + data)[-4096:]


def _partial_suffix(data: bytes, mark: bytes) -> int:
    """Length of the longest end of `data` that is a beginning of `mark`."""
    for length in range(min(len(data), len(mark) - 1), 0, -1):
        if data.endswith(mark[:length]):
            return length
    return 0
