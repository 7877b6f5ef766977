"""One SSH connection whose commands always end, and whose bytes flow both ways at the speed of the channel.

Paramiko's channels are driven here, not by a runner on top of them: those that there are capture in quadratic
time (20 MB: 53 s), open channels without a limit and hang on a dead peer.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterable

import paramiko

from controller.deadline import DEFAULT, Deadline
from controller.dial import dial
from controller.endpoint import Endpoint
from controller.errors import ConnectionLost
from controller.watchdog import Watchdog

# What Paramiko puts into one packet of OpenSSH's 32 KiB. Its sendall copies the rest of its buffer for each
# packet (64 MiB in one piece go at 2 MiB/s), and of 32 KiB it would make two, one of them of 64 bytes.
SLICE = 32 * 1024 - 64
READ = 256 * 1024
_LOST = "check the host and the way to it; the run may be fine"
_SUSPENDED = "it may be suspended, by a backup for instance: nothing was begun, try again when it is resumed"
_FREES_S = 2.0  # for which a host may go on counting a channel that we have closed
_LINGER_S = 1.0  # how long a finished command may take to give its exit status

Sink = Callable[[bytes], None]


class Link:
    """An open connection to the host of one box. Threads may run commands side by side, a channel each.

    `connect_s`: how long it took to open, login included.
    """

    def __init__(self, endpoint: Endpoint, deadline: Deadline = DEFAULT) -> None:
        self.endpoint = endpoint
        began = time.monotonic()
        self._connection = dial(endpoint, deadline)
        self.connect_s = time.monotonic() - began
        self._transport: paramiko.Transport = self._connection.transport
        self._watchdog = Watchdog(self._transport, idle=deadline.idle)
        self._channels = 0
        self._room = threading.Condition()

    @property
    def alive(self) -> bool:
        return self._transport.is_active()

    def run(
        self,
        command: str,
        *,
        feed: Iterable[bytes] = (),
        on_stdout: Sink,
        on_stderr: Sink,
        finished: Callable[[], bool] = lambda: False,
        deadline: Deadline = DEFAULT,
    ) -> int | None:
        """Run one command line: send `feed`, drain both outputs meanwhile, return its exit status.

        `finished` may say that all that matters has arrived: a child that holds the pipes no longer keeps us.
        None: the channel ended without a status. Raises Unreachable, and what `feed` or a sink raises.
        """
        channel = self._channel(deadline)
        try:
            channel.exec_command(command)
            sender = _Sender(channel, feed, self._watchdog)
            self._drain(channel, sender, on_stdout, on_stderr, finished, deadline)
            status = channel.recv_exit_status() if channel.exit_status_ready() else -1
            if status < 0:
                self._check(None, deadline)
            return None if status < 0 else status
        except (paramiko.SSHException, EOFError) as error:
            self._check(None, deadline)
            raise self._lost(f"it closed the channel: {error or type(error).__name__}") from error
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                channel.close()  # it says goodbye, on a dead line too
            with self._room:
                self._channels -= 1
                self._room.notify()

    def close(self) -> None:
        self._watchdog.stop()
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.close()

    def _channel(self, deadline: Deadline) -> paramiko.Channel:
        """A new channel; where the host allows no more (MaxSessions), once another of ours has ended."""
        ends_at = time.monotonic() + deadline.total if deadline.total else None
        quiet_at = time.monotonic() + _FREES_S
        while True:
            with self._room:
                self._channels += 1
            try:
                return self._transport.open_session(timeout=deadline.connect)
            except (paramiko.SSHException, EOFError, OSError) as error:
                with self._room:
                    self._channels -= 1
                    if self._channels:
                        quiet_at = time.monotonic() + _FREES_S
                    if _is_refusal(error) and self.alive and time.monotonic() < quiet_at:
                        self._room.wait(0.1)
                        self._check(ends_at, deadline)
                        continue
                self.close()
                raise self._lost(f"it opens no channel: {error}") from None

    def _drain(
        self,
        channel: paramiko.Channel,
        sender: _Sender,
        on_stdout: Sink,
        on_stderr: Sink,
        finished: Callable[[], bool],
        deadline: Deadline,
    ) -> None:
        ends_at = time.monotonic() + deadline.total if deadline.total else None
        begins_by: float | None = time.monotonic() + deadline.begin
        lingering_since: float | None = None
        while True:
            moved = False
            while channel.recv_ready():
                on_stdout(channel.recv(READ))
                moved, begins_by = True, None
            while channel.recv_stderr_ready():
                on_stderr(channel.recv_stderr(READ))
                moved = True
            if sender.error is not None:
                raise sender.error
            if moved:
                self._watchdog.heard()
                continue
            ended = channel.closed or channel.eof_received
            if (ended and channel.exit_status_ready()) or channel.closed:
                if channel.recv_ready() or channel.recv_stderr_ready():
                    continue  # the last bytes and the end may arrive between two looks
                return
            if ended or finished():
                lingering_since = lingering_since or time.monotonic()
                if time.monotonic() - lingering_since > _LINGER_S:
                    return
            self._check(ends_at, deadline)
            if begins_by is not None and time.monotonic() > begins_by:
                raise self._lost(f"it did not begin to answer within {deadline.begin:g} s", _SUSPENDED)
            if channel.eof_received:
                channel.status_event.wait(0.05)  # select would return at once, for ever
            else:
                select.select([channel], [], [], 0.2)

    def _check(self, ends_at: float | None, deadline: Deadline) -> None:
        if self._watchdog.dead:
            raise self._lost(f"no sign of life for {deadline.idle:g} s")
        if not self._transport.is_active():
            raise self._lost("the connection broke")
        if ends_at is not None and time.monotonic() > ends_at:
            raise self._lost(f"no answer within {deadline.total:g} s")

    def _lost(self, why: str, mend: str = _LOST) -> ConnectionLost:
        return ConnectionLost(f"lost {_where(self.endpoint)}: {why}", mend)


class _Sender:
    """Sends in its own thread, because a peer that waits for us to read would otherwise never read."""

    def __init__(self, channel: paramiko.Channel, feed: Iterable[bytes], watchdog: Watchdog) -> None:
        self.error: BaseException | None = None
        self._channel, self._feed, self._watchdog = channel, feed, watchdog
        threading.Thread(target=self._send, name="pctrun-sender", daemon=True).start()

    def _send(self) -> None:
        try:
            for piece in self._feed:
                view = memoryview(piece)
                for at in range(0, len(view), SLICE):
                    self._push(view[at : at + SLICE])
            self._channel.shutdown_write()
        except _PeerStoppedReading:
            pass  # not a failure in itself: the answer says why
        except BaseException as error:
            self.error = error

    def _push(self, view: memoryview) -> None:
        try:
            self._channel.sendall(bytes(view))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise _PeerStoppedReading from error
        self._watchdog.heard()  # true within one window: a peer that reads no more blocks the next slices


def _is_refusal(error: BaseException) -> bool:
    """Whether the host did not want one more channel. Of refusals at once Paramiko gives one its reason."""
    return isinstance(error, paramiko.ChannelException) or str(error) == "Unable to open channel."


class _PeerStoppedReading(Exception):
    pass


def _where(endpoint: Endpoint) -> str:
    return f"{endpoint.host}:{endpoint.port}" if endpoint.port not in (None, 22) else endpoint.host
