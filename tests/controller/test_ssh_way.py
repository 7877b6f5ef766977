"""The way to a host: jump hosts, ssh_config and ProxyCommand, each against real servers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from controller import sandbox
from controller.endpoint import Endpoint, resolve
from controller.errors import HostKeyRefused, Unreachable
from controller.inventory import Box
from controller.transport import Link

from .conftest import run

MIB = 1 << 20


def test_a_jump_host_is_checked_like_any_other(
    endpoint: Endpoint, embedded: sandbox.Endpoint, tmp_path: Path
) -> None:
    """The sandbox's server stands in for the jump host: unknown to known_hosts, so it is refused by name."""
    jump = f"root@127.0.0.1:{embedded.port}"
    known = tmp_path / "known_hosts"
    with pytest.raises(HostKeyRefused, match=rf"\[127.0.0.1\]:{embedded.port} is not known"):
        Link(Endpoint(**{**vars(endpoint), "proxy_jump": jump, "known_hosts": str(known)}))


JUMP_HOST = """
import asyncio, sys, asyncssh

class Forwarder(asyncssh.SSHServer):
    def connection_requested(self, *where):
        return True

async def serve(client_keys, *host_keys):
    server = await asyncssh.listen("127.0.0.1", 0, server_factory=Forwarder, server_host_keys=list(host_keys),
                                   authorized_client_keys=client_keys)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.wait_closed()

asyncio.run(serve(*sys.argv[1:]))
"""


@pytest.fixture
def jump_host(embedded: sandbox.Endpoint, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A second SSH server that forwards and does nothing else: `user@host:port` and its known_hosts line.

    It has two keys, and the one that is known is not the one that Paramiko would ask for.
    """
    argv = [sys.executable, "-c", JUMP_HOST, f"{embedded.identity_file}.pub"]
    for kind in ("ssh-ed25519", "ssh-rsa"):
        key = asyncssh.generate_private_key(kind)
        key.write_private_key(str(tmp_path / kind))
        argv.append(str(tmp_path / kind))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        public = " ".join(key.export_public_key().decode().split()[:2])
        yield f"root@127.0.0.1:{port}", f"[127.0.0.1]:{port} {public}"
        server.terminate()


def test_a_command_runs_through_a_jump_host(
    endpoint: Endpoint, embedded: sandbox.Endpoint, jump_host: tuple[str, str], tmp_path: Path
) -> None:
    jump, known_line = jump_host
    known = tmp_path / "known_hosts"
    known.write_text(f"{known_line}\n{embedded.known_hosts_line}\n")
    through = {"proxy_jump": jump, "known_hosts": str(known), "host_key": None}
    link = Link(Endpoint(**{**vars(endpoint), **through}))
    assert run(link, "echo through") == (0, b"through\n", b"")
    link.close()
    stranger = Endpoint(**{**vars(endpoint), **through, "proxy_jump": jump.replace("root@", "ghost@")})
    known.write_text(f"{embedded.known_hosts_line}\n")
    with pytest.raises(HostKeyRefused, match=re.escape(jump.partition(":")[2])):
        Link(stranger)


def test_names_users_ports_and_keys_of_ssh_config_are_used(
    embedded: sandbox.Endpoint, real_box: Callable[..., Box], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        f"Host pve-alias\n  HostName 127.0.0.1\n  Port {embedded.port}\n  User root\n  ProxyJump none\n"
        f"  IdentityFile {embedded.identity_file}\n  IdentityFile ~/.ssh/not-there\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    link = Link(resolve(real_box(host="pve-alias", port=None, user=None, identity_file=None)))
    assert run(link, "echo alias")[1] == b"alias\n"
    link.close()


RELAY = """
import os, select, socket, sys
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    for end in select.select([0, line], [], [])[0]:
        data = os.read(0, 65536) if end == 0 else line.recv(65536)
        if not data:
            sys.exit()
        line.sendall(data) if end == 0 else os.write(1, data)
"""


def test_a_proxy_command_of_ssh_config_is_the_way(
    embedded: sandbox.Endpoint, real_box: Callable[..., Box], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "relay.py").write_text(RELAY)
    relay = f"{sys.executable} {tmp_path}/relay.py 127.0.0.1 {embedded.port}"
    (tmp_path / ".ssh" / "config").write_text(f"Host pve-behind\n  ProxyCommand {relay}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    link = Link(resolve(real_box(host="pve-behind", port=None)))
    assert run(link, "cat", feed=[bytes(MIB)]) == (0, bytes(MIB), b"")
    link.close()
    (tmp_path / ".ssh" / "config").write_text("Host pve-behind\n  ProxyCommand /nowhere/relay\n")
    with pytest.raises(Unreachable, match="cannot reach pve-behind"):
        Link(resolve(real_box(host="pve-behind", port=None)))
