"""The sandbox's SSH server: a process of its own, so that it outlives a command and can vanish in mid-run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import asyncssh

from .pct.host import read_pairs, start_time, write_pairs
from .place import ADDRESS, USER
from .sshd_session import Session

MAX_SESSIONS = 10  # OpenSSH's default; a client that opens more gets "open failed"
WINDOW = 4 << 20  # bytes in flight towards us; asyncssh's 2 MiB default halves an upload's speed


class Server(asyncssh.SSHServer):
    """One connection: lets the sandbox's own key in, hands out at most MAX_SESSIONS sessions."""

    def __init__(
        self, folder: Path, client_key: asyncssh.SSHKey, live: set[asyncssh.SSHServerConnection]
    ) -> None:
        self.folder = folder
        self.client_key = client_key
        self.live = live
        self.sessions: set[Session] = set()

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self.connection = conn
        self.live.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self.live.discard(self.connection)
        for session in list(self.sessions):
            session.hang_up()

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == USER and key.public_data == self.client_key.public_data

    def session_requested(self) -> Session:
        if len(self.sessions) >= MAX_SESSIONS:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "open failed")
        return Session(self.folder, self.connection, self.sessions)


async def serve(folder: Path, ready: int) -> None:
    """Listen until SIGTERM; SIGUSR1 breaks every connection. `ready` is told once clients can come."""
    live: set[asyncssh.SSHServerConnection] = set()
    host_key = own_key(folder / "keys" / "host_ed25519")
    client_key = own_key(folder / "keys" / "client_ed25519")
    options = {
        "server_host_keys": [host_key],
        "encoding": None,
        "line_editor": False,
        "compression_algs": None,
        "agent_forwarding": False,
        "x11_forwarding": False,
        "window": WINDOW,
        "server_version": "pctrun-sandbox",
        "reuse_address": True,
    }

    async def listen(port: int) -> asyncssh.SSHAcceptor:
        return await asyncssh.create_server(
            lambda: Server(folder, client_key, live), ADDRESS, port, **options
        )

    record = folder / "server"
    last_port = int(read_pairs(str(record)).get("port", "0")) if record.exists() else 0
    try:
        acceptor = await listen(last_port)
    except OSError:  # somebody else has it by now
        acceptor = await listen(0)
    pid = os.getpid()
    facts = {"pid": str(pid), "start": start_time(pid) or "", "port": str(acceptor.get_port())}
    write_pairs(str(record), facts)
    os.write(ready, b"ready\n")
    os.close(ready)

    def cut() -> None:
        for connection in list(live):
            connection.abort()

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, cut)
    await stop.wait()
    acceptor.close()
    cut()


def own_key(path: Path) -> asyncssh.SSHKey:
    """Read a key pair, made on first use; the private half is for its owner alone."""
    if not path.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment="pctrun-sandbox")
        path.with_name(path.name + ".pub").write_bytes(key.export_public_key())
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key.export_private_key())
        draft.rename(path)
    return asyncssh.read_private_key(path)


def main() -> None:
    """`python -m controller.sandbox.sshd FOLDER READY_FD`: leaves a daemon behind and returns."""
    if os.fork():
        return
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
    ):  # children must not inherit what our starter ignored
        signal.signal(number, signal.SIG_DFL)
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
