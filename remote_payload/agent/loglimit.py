"""A log that runs away must not fill the disk: its oldest part is given back to the file system in place.

The trainer writes to an open descriptor, so renaming would not stop it, and copying and truncating loses
what is written in between. A punched hole loses nothing that is kept, and every byte keeps its offset; ext4,
XFS, Btrfs, ZFS and tmpfs can do it.
"""

from __future__ import annotations

import ctypes
import os

KEEP = 256 * 1024 * 1024  # bytes of the end: millions of lines
STEP = 64 * 1024 * 1024  # beyond that, before it is worth a call
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_BLOCK = 4096


class Limiter:
    """Drops the beginning of a log when it takes `keep` + `step` bytes of disk; gives up where that fails."""

    def __init__(self, path: str, keep: int = KEEP, step: int = STEP) -> None:
        self.path, self.keep, self.step, self.works = path, keep, step, True

    def enforce(self) -> None:
        try:
            facts = os.stat(self.path)
            if not self.works or facts.st_blocks * 512 < self.keep + self.step:
                return
            length = (facts.st_size - self.keep) // _BLOCK * _BLOCK
            handle = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self.works = length > 0 and _punch(handle, length)
        finally:
            os.close(handle)


def _punch(handle: int, length: int) -> bool:
    """Free the first `length` bytes; False where the file system or the C library cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return False
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(call(handle, _KEEP_SIZE | _PUNCH_HOLE, 0, length) == 0)


def first_byte(path: str, at: int) -> int:
    """`at`, or when that was given back the beginning of the first whole line that is still there."""
    try:
        with open(path, "rb") as file:
            there = os.lseek(file.fileno(), at, os.SEEK_DATA)
            if there == at:
                return at
            file.seek(there)
            return there + len(file.readline())
    except OSError:  # behind the end, or a file system that knows no holes
        return at
