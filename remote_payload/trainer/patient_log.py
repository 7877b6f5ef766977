"""A line that the log's disk has no room for must not end a training: it waits in a buffer, or is lost."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEPT_BYTES = 64 * 1024  # of lines that wait for room: ten minutes of steps that take a second


class PatientStream(io.TextIOWrapper):
    """Text to a descriptor or to the end of a file, a line at a time. Anything but a full disk raises as
    usual."""

    def __init__(self, place: int | Path) -> None:
        raw = io.FileIO(place, "ab") if isinstance(place, Path) else io.FileIO(place, "wb", closefd=False)
        super().__init__(io.BufferedWriter(raw, _KEPT_BYTES), "utf-8", "replace", line_buffering=True)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            if error.errno not in _FULL:
                raise


def install() -> None:
    """Let this process's own prints outlive a full disk."""
    sys.stdout, sys.stderr = PatientStream(1), PatientStream(2)
