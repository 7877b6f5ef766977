"""Files come as a tar through a pipe; what is read of them must cost little beside the pipe itself."""

from __future__ import annotations

import io
import os
import signal
import tarfile
from collections.abc import Iterator
from types import FrameType
from typing import IO, Any, Optional, Protocol, Tuple, cast

from agent.call import Refusal

IDLE_S = 60  # without a byte for so long the connection is dead, and the lock must not be held for it
_BLOCK = 256 << 10  # bytes of a file at once
_BEGIN = 8 << 20  # then the disk begins with it: fsync waits for the last alone, 40 ms less at 100 MiB


class Readable(Protocol):
    def readinto(self, block: memoryview) -> Optional[int]: ...


def members(stdin: IO[bytes]) -> Iterator[Tuple[tarfile.TarInfo, Content]]:
    """What a tar on our stdin holds, each member with its content, which is there until the next is asked
    for.

    tarfile reads the headers; contents come straight from the pipe, since on their way through tarfile they
    are copied four times. Raises TarError or EOFError where the stream ends within a file; one that ends
    between two files just holds fewer.
    """
    source = _Pipe(stdin)
    with tarfile.open(fileobj=cast(IO[bytes], source), mode="r:") as tar:
        for member in tar:
            yield member, Content(source, member.size)
    source.read(_BLOCK)  # the rest: a socket that is closed with bytes unread resets its other direction, too


def copy(content: Readable, sha: Any, output: Optional[IO[bytes]]) -> int:
    """Hash the content, and write it, if there is an `output`; its size."""
    block = memoryview(bytearray(_BLOCK))  # one for all: a fresh one costs a page fault for each 4 KiB
    size = begun = 0
    start = output.tell() if output is not None else 0
    while True:
        count = content.readinto(block)
        if not count:
            return size
        sha.update(block[:count])
        size += count
        if output is not None:
            output.write(block[:count])
            if size - begun >= _BEGIN:  # this drops nothing that is dirty, it has it written
                os.posix_fadvise(output.fileno(), start + begun, size - begun, os.POSIX_FADV_DONTNEED)
                begun = size


class Content:
    """One member's bytes, in the order in which they come."""

    def __init__(self, source: _Pipe, size: int) -> None:
        self._source, self._left = source, size

    def readinto(self, block: memoryview) -> int:
        wanted = min(len(block), self._left)
        count = self._source.readinto(block[:wanted]) if wanted else 0
        if wanted and not count:
            raise EOFError("in the middle of a file")
        self._left -= count
        return count


class _Pipe:
    """As much of a file as tarfile needs, over what can only be read on. It gives up when no byte comes for
    IDLE_S: after a lost network a pipe may never close."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._at = cast(io.BufferedReader, source), 0

    def tell(self) -> int:
        return self._at

    def seek(self, to: int) -> int:
        """Forwards, over the padding behind a file."""
        if len(self.read(to - self._at)) < to - self._at:
            raise EOFError("between two files")
        return self._at

    def read(self, size: int) -> bytes:
        """All of `size` bytes, fewer at the end."""
        block = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            count = self.readinto(block[filled:])
            if not count:
                break
            filled += count
        return bytes(block[:filled])

    def readinto(self, block: memoryview) -> int:
        """What is there: a slow line is no dead one."""

        def give_up(number: int, frame: FrameType | None) -> None:
            raise Refusal("verify", f"the stream of files stood still for {IDLE_S} s", "deploy again")

        before = signal.signal(signal.SIGALRM, give_up)
        signal.alarm(IDLE_S)
        try:
            count = self._source.readinto1(block)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        self._at += count
        return count
