"""Shared by the controller's tests: a real sandbox, a TCP proxy that can fail, golden files."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller import links, sandbox
from controller.endpoint import Endpoint, resolve
from controller.inventory import Box
from controller.transport import Link

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sandbox.Endpoint]:
    """A running sandbox in a folder of its own, gone afterwards."""
    folder = tmp_path_factory.mktemp("sandbox")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCTRUN_SANDBOX", str(folder))
        patch.setenv("PCTRUN_STATE", str(tmp_path_factory.mktemp("state")))
        yield sandbox.up()
        links.close_all()
        sandbox.down(container=True, keep_data=False)


@pytest.fixture
def box(embedded: sandbox.Endpoint) -> Iterator[Box]:
    """The sandbox as the inventory names it; each test has a connection of its own."""
    box = Box(name="sandbox", sandbox=True, vmid=embedded.vmid, recipe="smollm2-135m")
    yield box
    links.drop(box)


@pytest.fixture
def real_box(embedded: sandbox.Endpoint) -> Iterator[Callable[..., Box]]:
    """Makes boxes that reach the same server the way a Proxmox host is reached; `real_box(port=…)`."""
    made: list[Box] = []

    def make(**given: object) -> Box:
        fields = {
            "host": embedded.host,
            "port": embedded.port,
            "user": embedded.user,
            "identity_file": str(embedded.identity_file),
            "host_key": embedded.host_key,
            "vmid": embedded.vmid,
            "agent_python": embedded.agent_python,
            "python": embedded.python,
            "recipe": "smollm2-135m",
            **given,
        }
        wanted = {key: value for key, value in fields.items() if value is not None}
        box = Box(name=f"real-{len(made)}", **wanted)
        made.append(box)
        return box

    yield make
    for box in made:
        links.drop(box)


class Proxy:
    """Forwards TCP to a port until told to freeze (take everything, pass nothing on) or to cut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.frozen = threading.Event()
        self.served = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection that is open now; new ones are served."""
        pairs, self._pairs = self._pairs, []
        for end in [end for pair in pairs for end in pair]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Break what is open and take nothing new."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._pairs.append((near, far))
                self.served += 1
                threading.Thread(target=self._serve, args=(near, far), daemon=True).start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with contextlib.suppress(OSError, ValueError), near, far:
            while True:
                for end in select.select([near, far], [], [], 0.5)[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    if not self.frozen.is_set():
                        other[end].sendall(data)


@pytest.fixture
def proxy(embedded: sandbox.Endpoint) -> Iterator[Proxy]:
    made = Proxy(embedded.port)
    yield made
    made.close()


@pytest.fixture
def endpoint(real_box: Callable[..., Box]) -> Endpoint:
    """The same server as a Proxmox host's endpoint."""
    return resolve(real_box())


def run(link: Link, command: str, **options: object) -> tuple[int | None, bytes, bytes]:
    """Status, stdout and stderr of one command line on the host."""
    out, err = bytearray(), bytearray()
    status = link.run(command, on_stdout=out.extend, on_stderr=err.extend, **options)
    return status, bytes(out), bytes(err)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares with `tests/golden/NAME`; PCTRUN_UPDATE_GOLDEN=1 writes it instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("PCTRUN_UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", "utf-8")
        assert path.is_file(), f"no golden file {path}; PCTRUN_UPDATE_GOLDEN=1 writes it"
        assert text + "\n" == path.read_text("utf-8")

    return check
