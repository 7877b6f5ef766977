"""One real sandbox for these tests: its own folder, its own server and container, nothing left behind."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
import pytest

from controller import sandbox
from controller.sandbox.pct.host import Host, write_pairs


@dataclass
class Done:
    code: int
    out: bytes
    err: str


class Box:
    """The sandbox under test, reached both ways: by SSH and by its `pct` directly."""

    def __init__(self, folder: Path, endpoint: sandbox.Endpoint) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.host = Host(str(folder))
        self.kept: paramiko.SSHClient | None = None

    def connect(self, username: str = "root", key: paramiko.PKey | None = None) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        where = f"[{self.endpoint.host}]:{self.endpoint.port}"
        _, kind, blob = self.endpoint.known_hosts_line.split()
        entry = paramiko.hostkeys.HostKeyEntry.from_line(f"{where} {kind} {blob}")
        assert entry is not None and entry.key is not None
        client.get_host_keys().add(where, kind, entry.key)
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        client.connect(
            self.endpoint.host,
            self.endpoint.port,
            username,
            pkey=key or paramiko.Ed25519Key.from_private_key_file(str(self.endpoint.identity_file)),
            allow_agent=False,
            look_for_keys=False,
            timeout=20,
        )
        return client

    def pct(self, *arguments: str, stdin: bytes = b"", timeout: float = 60) -> Done:
        done = subprocess.run(
            [self.folder / "bin" / "pct", *arguments], input=stdin, capture_output=True, timeout=timeout
        )
        return Done(done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    def inside(self, script: str, vmid: int = 200) -> str:
        """Run a shell script in the container; what it printed."""
        done = self.pct("exec", str(vmid), "--", "bash", "-s", stdin=script.encode())
        assert done.code == 0, done.err
        return done.out.decode().strip()

    def runs(self, marker: str, vmid: int = 200) -> bool:
        """Whether a process with this argument is in the container."""
        listing = self.pct("exec", str(vmid), "--", "ps", "-eo", "args")
        return any(
            marker in line and not line.startswith("ps ") for line in listing.out.decode().splitlines()
        )

    @staticmethod
    def wait_for(fact: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        """Wait until `fact()`; fail with `what` when it does not come."""
        deadline = time.monotonic() + timeout_s
        while not fact():
            assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    folder = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCTRUN_SANDBOX", str(folder))
        try:
            endpoint = sandbox.up()
        except sandbox.SandboxError as error:
            shutil.rmtree(folder)
            pytest.skip(f"no sandbox on this machine: {error.message}; {error.hint}")
    box = Box(folder, endpoint)
    yield box
    if box.kept:
        box.kept.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCTRUN_SANDBOX", str(folder))
        sandbox.down(keep_data=False)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def own_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions act on the sandbox under test, never on the project's own."""
    monkeypatch.setenv("PCTRUN_SANDBOX", str(request.getfixturevalue("box").folder))


@pytest.fixture
def connection(box: Box) -> paramiko.SSHClient:
    """A connection that is kept from test to test as long as it lives."""
    transport = box.kept.get_transport() if box.kept else None
    if box.kept is None or transport is None or not transport.is_active():
        box.kept = box.connect()
    return box.kept


Ssh = Callable[..., Done]


@pytest.fixture
def ssh(connection: paramiko.SSHClient) -> Ssh:
    """Run one line on the host over the kept connection."""

    def run(line: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Done:
        transport = connection.get_transport()
        assert transport is not None
        channel = transport.open_session(timeout=20)
        channel.settimeout(60)
        for name, value in (env or {}).items():
            channel.set_environment_variable(name, value)
        channel.exec_command(line)
        with contextlib.suppress(OSError):  # the command may be over before it has read a thing
            if stdin:
                channel.sendall(memoryview(stdin))
            channel.shutdown_write()
        with channel.makefile("rb") as out, channel.makefile_stderr("rb") as err:
            output, errors = out.read(), err.read().decode(errors="replace")
        return Done(channel.recv_exit_status(), output, errors)

    return run


@pytest.fixture
def second(box: Box) -> Iterator[int]:
    """A running container 201 for tests that stop, lock or fill one."""
    write_pairs(box.host.config_path(201), {"hostname": "ct201", "memory": "512"})
    assert box.pct("start", "201").code == 0
    yield 201
    write_pairs(box.host.config_path(201), {"hostname": "ct201"})
    box.pct("stop", "201")
    Path(box.host.config_path(201)).unlink()
