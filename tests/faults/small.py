"""File systems with little room: a tmpfs of a few KiB or files, mounted inside the container."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .house import House


@contextmanager
def small(house: House, name: str, options: str) -> Iterator[tuple[str, Path]]:
    """`/var/NAME` of the container on a tmpfs of its own: its path there, and as the host sees it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    inner, init = f"/var/{name}", house.init
    (house.ct / "var" / name).mkdir(exist_ok=True)
    enter = ["nsenter", "-t", str(init), "-m"]
    mount = [*enter, "mount", "-t", "tmpfs", "-o", options, "none", inner]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        yield inner, Path(f"/proc/{init}/root{inner}")
    finally:
        subprocess.run([*enter, "umount", "-l", inner], capture_output=True, check=False)


def fill(folder: Path, leave: int = 0) -> Path:
    """Take all room but `leave` bytes; the file to remove for having it back."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        room = os.statvfs(folder)
        rest = room.f_bavail * room.f_frsize - leave
        while rest > 0:
            try:
                rest -= file.write(bytes(min(rest, 1 << 16)))
            except OSError:
                break
    return filler


def fill_inodes(folder: Path, leave: int = 0) -> Path:
    """Take all files but `leave`; the folder to remove for having them back."""
    many = folder / "many"
    many.mkdir()
    for number in range(os.statvfs(folder).f_favail - leave):
        (many / str(number)).touch()
    return many
