"""A second terminal inside the container for `ssh -t`, as lxc-attach makes one: tmux wants its name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
from collections.abc import Callable
from typing import Any

from . import enter

PIECE = 65536
TIOCGPTPEER = 0x5441  # asm-generic/ioctls.h; not in Python's termios
TIOCSPTLCK = 0x40045431


def run_on_terminal(init: int, terminals: list[int], become_command: Callable[[], None]) -> int:
    """Run the command on a new terminal of the container, in place of each of our streams that is one."""
    outer = terminals[0]
    master = os.open(f"/proc/{init}/root/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, TIOCSPTLCK, struct.pack("i", 0))
    slave = fcntl.ioctl(master, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY)
    _copy_size(outer, master)
    enter.join(init)
    child = os.fork()
    if child == 0:
        os.close(master)
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in terminals:
            os.dup2(slave, fd)
        os.close(slave)
        become_command()
    os.close(slave)
    before = termios.tcgetattr(outer)
    signal.signal(signal.SIGWINCH, lambda *_: _copy_size(outer, master))
    try:
        _pass_keys_through(outer, before)
        _relay(outer, terminals[-1], master, os.pidfd_open(child))
    finally:
        os.close(master)  # the kernel hangs up on what still runs there
        with contextlib.suppress(termios.error):  # ours may be gone
            termios.tcsetattr(outer, termios.TCSANOW, before)
    return enter.wait(child)


def _copy_size(source: int, target: int) -> None:
    size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def _pass_keys_through(fd: int, before: list[Any]) -> None:
    """Keys go on untouched; the outer terminal's own line ending stays, so lines end in CR CR LF."""
    changed = list(before)
    changed[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON | termios.ISTRIP)
    changed[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG | termios.IEXTEN)
    termios.tcsetattr(fd, termios.TCSANOW, changed)


def _relay(source: int, sink: int, master: int, ended: int) -> None:
    """Copy both ways until the command has ended (and what it wrote is copied) or our terminal is gone."""
    while True:
        ready = select.select([source, master, ended], [], [])[0]
        if ready == [ended]:
            return
        for fd in ready:
            if fd == ended:
                continue
            try:
                piece = os.read(fd, PIECE)
            except OSError:  # EIO: the other side of a terminal is closed
                piece = b""
            if not piece:
                return
            _write_all(master if fd == source else sink, piece)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
