"""One SSH session: `bash -c LINE` as the real sshd runs it, its pipes joined to the channel, never killed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping
from pathlib import Path

import asyncssh

from .pct.host import Host, read_pairs

PIPE_BYTES = 1 << 20  # of each pipe to the child; the default 64 KiB costs a wake-up per two packets
PIECE = 256 << 10
ACCEPTED_ENV = ("LANG", "LC_")  # Debian's AcceptEnv
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STDOUT, STDERR = None, asyncssh.EXTENDED_DATA_STDERR


class Session(asyncssh.SSHServerSession[bytes]):
    """Joins a channel to a child. When the client goes away the pipes are closed, and that is all."""

    def __init__(
        self, folder: Path, connection: asyncssh.SSHServerConnection, siblings: set[Session]
    ) -> None:
        self.folder = folder
        self.connection = connection
        self.siblings = siblings
        self.loop = asyncio.get_running_loop()
        self.line: str | None = None
        self.terminal: tuple[str, tuple[int, int, int, int]] | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.stdin = -1
        self.outputs: dict[int, int | None] = {}  # fd -> kind of channel data
        self.unwritten = bytearray()
        self.stdin_ends = False
        self.paused = False
        siblings.add(self)

    # what the client asks for

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self.chan = chan

    def connection_lost(self, exc: Exception | None) -> None:
        self.hang_up()

    def pty_requested(
        self, term_type: str, term_size: tuple[int, int, int, int], term_modes: Mapping[int, int]
    ) -> bool:
        self.terminal = term_type, term_size
        return True

    def exec_requested(self, command: str) -> bool:
        self.line = command
        return True

    def shell_requested(self) -> bool:
        return True

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self.terminal and self.stdin >= 0:
            set_size(self.stdin, (width, height, pixwidth, pixheight))

    def session_started(self) -> None:
        try:
            ends = self._spawn_on_terminal() if self.terminal else self._spawn_on_pipes()
        except OSError as error:  # the line is longer than one argument may be, or no process can be had
            self.chan.write(f"{shell()}: {error.strerror}\n".encode(), STDERR)
            self.chan.exit(1)
            return
        self.stdin, self.outputs = ends
        assert self.child is not None
        self.pidfd = os.pidfd_open(self.child.pid)
        self.loop.add_reader(self.pidfd, self._child_ended)
        for fd in {self.stdin, *self.outputs}:
            os.set_blocking(fd, False)
        self._watch_outputs()

    # client -> child

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if self.stdin < 0:
            return
        if self.unwritten:
            self.unwritten += data
            return
        rest = self._write(data)
        if rest:
            self.unwritten += rest
            self.chan.pause_reading()
            self.loop.add_writer(self.stdin, self._write_more)

    def eof_received(self) -> bool:
        self.stdin_ends = True
        if not self.unwritten and not self.terminal:
            self._close_stdin()
        return True  # our direction stays open

    def _write(self, data: bytes | bytearray) -> memoryview:
        """Write what the child takes now; what remains. A child that reads no more takes everything."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.stdin, view) :]
        except BlockingIOError:
            return view
        except OSError:
            self._close_stdin()
        return memoryview(b"")

    def _write_more(self) -> None:
        rest = bytes(self._write(self.unwritten))
        self.unwritten = bytearray(rest)
        if rest:
            return
        if self.stdin >= 0:
            self.loop.remove_writer(self.stdin)
        self.chan.resume_reading()
        if self.stdin_ends and not self.unwritten and not self.terminal:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self.stdin < 0:
            return
        self.loop.remove_writer(self.stdin)
        if self.stdin not in self.outputs:  # a terminal is both
            os.close(self.stdin)
        self.stdin = -1

    # child -> client

    def pause_writing(self) -> None:
        self.paused = True
        for fd in self.outputs:
            self.loop.remove_reader(fd)

    def resume_writing(self) -> None:
        self.paused = False
        self._watch_outputs()

    def _watch_outputs(self) -> None:
        for fd in self.outputs:
            self.loop.add_reader(fd, self._read, fd)

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return
        except OSError:  # EIO: nobody holds the terminal any more
            data = b""
        if data:
            self.chan.write(data, self.outputs[fd])
        else:
            self._close_output(fd)
            self._exit_when_done()

    def _close_output(self, fd: int) -> None:
        self.loop.remove_reader(fd)
        if fd == self.stdin:
            self._close_stdin()
        del self.outputs[fd]
        os.close(fd)

    # the end

    def _child_ended(self) -> None:
        self.loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1
        assert self.child is not None
        self.child.wait()
        if self.terminal:  # a background job may hold the terminal open; what is in it is all that there is
            for fd in list(self.outputs):
                while fd in self.outputs and self._has_data(fd):
                    self._read(fd)
                if fd in self.outputs:
                    self._close_output(fd)
        self._exit_when_done()

    def _has_data(self, fd: int) -> bool:
        return fcntl.ioctl(fd, termios.FIONREAD, bytes(4)) != bytes(4)

    def _exit_when_done(self) -> None:
        """Report the status once the child has ended and nobody holds its pipes, as sshd does."""
        if self.child is None or self.child.returncode is None or self.outputs:
            return
        code = self.child.returncode
        if code < 0:
            self.chan.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
        else:
            self.chan.exit(code)

    def hang_up(self) -> None:
        """The client is gone: close our ends. The child goes on and is waited for."""
        self.siblings.discard(self)
        self._close_stdin()
        for fd in list(self.outputs):
            self._close_output(fd)

    # starting the child

    def _spawn_on_pipes(self) -> tuple[int, dict[int, int | None]]:
        pipes = [os.pipe() for _ in range(3)]
        for read_end, _ in pipes:
            with contextlib.suppress(OSError):  # over the user's limit: the default size works, too
                fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = pipes
        try:
            self._spawn(in_read, out_write, err_write)
        except OSError:
            for fd in (in_write, out_read, err_read):
                os.close(fd)
            raise
        finally:
            for fd in (in_read, out_write, err_write):
                os.close(fd)
        return in_write, {out_read: STDOUT, err_read: STDERR}

    def _spawn_on_terminal(self) -> tuple[int, dict[int, int | None]]:
        assert self.terminal is not None
        master, slave = pty.openpty()
        set_size(master, self.terminal[1])
        try:
            self._spawn(slave, slave, slave, lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        except OSError:
            os.close(master)
            raise
        finally:
            os.close(slave)
        return master, {master: STDOUT}

    def _spawn(
        self, stdin: int, stdout: int, stderr: int, in_child: Callable[[], object] | None = None
    ) -> None:
        host = Host(str(self.folder))
        self.child = subprocess.Popen(
            [shell(), "--norc"] if self.line is None else [shell(), "--norc", "-c", self.line],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=self._environment(host),
            cwd=host.home,
            start_new_session=True,
            preexec_fn=in_child,
            umask=0o022,
        )

    def _environment(self, host: Host) -> dict[str, str]:
        """What root has after a login through sshd; no LANG unless the settings or the client give one."""
        peer, own = self.connection.get_extra_info("peername"), self.connection.get_extra_info("sockname")
        env = {
            "PATH": f"{self.folder}/bin:{PATH}",
            "HOME": "/root",
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
            "MAIL": "/var/mail/root",
            "PWD": host.home,
            "SSH_CLIENT": f"{peer[0]} {peer[1]} {own[1]}",
            "SSH_CONNECTION": f"{peer[0]} {peer[1]} {own[0]} {own[1]}",
        }
        lang = read_pairs(host.settings).get("lang")
        if lang:
            env["LANG"] = lang
        if self.terminal:
            env["TERM"] = self.terminal[0]
        sent = self.chan.get_environment()
        return env | {name: value for name, value in sent.items() if name.startswith(ACCEPTED_ENV)}


def set_size(terminal: int, size: tuple[int, int, int, int]) -> None:
    width, height, pixel_width, pixel_height = size
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, pixel_width, pixel_height))


def shell() -> str:
    """Root's login shell."""
    return shutil.which("bash") or "/bin/sh"
