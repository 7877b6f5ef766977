"""One embedded box behind a way that can fail, and a person who types commands at it.

The payload is the real agent and the stand-in trainer of `tests/agent/standin`: it keeps the contract of
files and signals and costs milliseconds. Commands run in this process: a third of a program start's time.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from invoke.program import Program

from controller import links, release, sandbox, tasks
from controller.deadline import DEFAULT

from .wire import Wire

ROOT = Path(__file__).resolve().parents[2]
MARK = b"PCTRUN_RUN_DIR="
# What the tests wait for a silent peer instead of 20 s, and for a connection instead of 15 s.
IDLE_S, CONNECT_S = 4.0, 8.0


@dataclass
class Said:
    """What a person sees of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one box's part of the `--json` document, which keeps its published schema."""
        document: dict[str, Any] = json.loads(self.out)
        schema = json.loads((ROOT / "docs/schema" / f"{document['task']}.json").read_text("utf-8"))
        jsonschema.validate(document, schema)
        return document["boxes"][0] if "boxes" in document else document


class Started:
    """A command that goes on; what it has said so far is in `out` and `err`."""

    def __init__(self, base: Path, words: tuple[str, ...], user: str) -> None:
        place = Path(tempfile.mkdtemp(dir=base, prefix="said-"))
        self._out, self._err = place / "out", place / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "invoke", *words],
                cwd=ROOT,
                env={**os.environ, "LOGNAME": user, "NO_COLOR": "1", "COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text("utf-8")

    @property
    def bytes(self) -> bytes:
        """`out` as it came."""
        return self._out.read_bytes()

    @property
    def err(self) -> str:
        return self._err.read_text("utf-8")

    def ended(self, timeout: float = 300) -> Said:
        return Said(self.process.wait(timeout), self.out, self.err)


class House:
    """`type` is a person at the workstation; `inside` is the container's disk as the host sees it."""

    def __init__(self, base: Path, endpoint: sandbox.Endpoint, port: int) -> None:
        self.base, self.endpoint = base, endpoint
        self.wire = Wire(port)
        self.ct = base / "sandbox" / "ct" / "200"
        self.runs = self.ct / "var/lib/pctrun/runs"
        self.opt = self.ct / "opt/pctrun"
        self.payload = base / "payload"
        self.inventory: dict[str, dict[str, Any]] = {}
        self.box("lab", port=self.wire.port)

    # -- the workstation -------------------------------------------------------------------------------

    def box(self, name: str, **changes: Any) -> str:
        """Add a box to the inventory: the container, reached as a real host is."""
        self.inventory[name] = {
            "host": self.endpoint.host,
            "user": self.endpoint.user,
            "port": self.wire.port,
            "identity_file": str(self.endpoint.identity_file),
            "host_key": self.endpoint.host_key,
            "vmid": self.endpoint.vmid,
            "agent_python": self.endpoint.agent_python,
            "python": self.endpoint.python,
            "recipe": "tiny",
            "grace_s": 4,
            "overrides": {"save_every": 5},
            **changes,
        }
        text = json.dumps({"default": "lab", "boxes": self.inventory})  # which is YAML, too
        (self.base / "inventory.yaml").write_text(text, "utf-8")
        return name

    def type(self, *words: str) -> Said:
        """`invoke WORDS`: exit code, stdout, stderr. Each command has a connection of its own."""
        out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _program(["invoke", *words])
            links.close_all()
        said = Said(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]
        assert "Traceback" not in said.out + said.err, said
        return said

    def start(self, *words: str, user: str = "ana") -> Started:
        """The same as a program of its own, for what lasts or is to be killed."""
        return Started(self.base, words, user)

    def status(self, box: str = "lab") -> dict[str, Any]:
        return self.type("status", "--json", "--box", box).json

    # -- the host --------------------------------------------------------------------------------------

    def pct(self, *words: str) -> str:
        """The host's own `pct`, past every way."""
        done = subprocess.run(
            [self.base / "sandbox" / "bin" / "pct", *words], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # -- the container's disk and processes -------------------------------------------------------------

    def whole(self, name: str = "current") -> str:
        """The release that a link names, proven file by file; its hash."""
        folder = self.opt / (self.opt / name).readlink()
        for file in json.loads((folder / "manifest.json").read_text())["files"]:
            data = (folder / file["path"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file["sha256"], file["path"]
        return folder.name

    def releases(self) -> list[str]:
        """All that lies there, debris included."""
        return sorted(path.name for path in (self.opt / "releases").iterdir())

    def run_ids(self) -> list[str]:
        return sorted(path.name for path in self.runs.iterdir()) if self.runs.is_dir() else []

    def file(self, run: str, name: str) -> dict[str, Any]:
        return json.loads((self.runs / run / name).read_text())

    def pids(self) -> list[int]:
        """The container's processes as the host counts them, without its init."""
        found, init = [], self.init
        space = Path(f"/proc/{init}/ns/pid").readlink()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "ns/pid").readlink() == space:
                    found.append(int(entry.name))
        return sorted(set(found) - {init})

    def alive(self) -> dict[str, list[int]]:
        """Run id -> the host's ids of its processes, by the marker in their environment."""
        found: dict[str, list[int]] = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for mark in [pair for pair in pairs if pair.startswith(MARK)]:
                    found.setdefault(Path(mark[len(MARK) :].decode()).name, []).append(pid)
        return found

    @property
    def init(self) -> int:
        """The container's first process, as the host counts."""
        pid = sandbox.status().container_pid
        assert pid is not None
        return pid

    def change_payload(self, size: int = 0) -> str:
        """Another payload than any before, with `size` bytes that no zip makes smaller; its release."""
        (self.payload / "trainer" / "extra.bin").write_bytes(os.urandom(max(16, size)))
        return release.scan().id

    def settle(self) -> None:
        """Nothing runs, nothing is locked, the way is whole."""
        self.wire.heal()
        self.wait_for(lambda: self.status()["snapshot"]["lock"] is None, "the last command lets go")
        said = self.type("abort")
        assert said.code == 0, said

    @contextlib.contextmanager
    def when(self, fact: Callable[[], Any], act: Callable[[], object]) -> Iterator[None]:
        """`act` once, as soon as `fact()`, while the block runs; fails when it never came to that."""
        done, over = threading.Event(), threading.Event()

        def came() -> bool:
            with contextlib.suppress(OSError):  # a file that is looked at goes away
                return bool(fact())
            return False

        def look() -> None:
            while not over.is_set():
                if came():
                    act()
                    done.set()
                    return
                time.sleep(0.002)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert done.is_set(), "the moment for the fault never came"

    @staticmethod
    def wait_for(fact: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        ends = time.monotonic() + seconds
        while not (value := fact()):
            assert time.monotonic() < ends, f"not within {seconds} s: {what}"
            time.sleep(0.05)
        return value


def _program(words: list[str]) -> int:
    try:
        # a copy: Invoke takes the help out of the tasks that it parses for
        Program(namespace=copy.deepcopy(tasks.namespace)).run(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return 0


@contextlib.contextmanager
def open_house() -> Iterator[House]:
    """A sandbox, an inventory and a state folder of their own; all of it is gone afterwards."""
    base = Path(tempfile.mkdtemp(prefix="pf", dir="/tmp")).resolve()
    shutil.copytree(ROOT / "remote_payload/agent", base / "payload/agent", ignore=_no_bytecode)
    shutil.copytree(ROOT / "tests/agent/standin", base / "payload", ignore=_no_bytecode, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCTRUN_SANDBOX", str(base / "sandbox"))
        patch.setenv("PCTRUN_STATE", str(base / "state"))
        patch.setenv("PCTRUN_INVENTORY", str(base / "inventory.yaml"))
        patch.setenv("NO_COLOR", "1")
        patch.setattr(release, "payload_root", lambda: base / "payload")
        try:
            endpoint = sandbox.up()
        except sandbox.SandboxError as error:
            shutil.rmtree(base)
            pytest.skip(f"no sandbox on this machine: {error.message}; {error.hint}")
        house = House(base, endpoint, endpoint.port)
        try:
            with _impatient():
                yield house
        finally:
            links.close_all()
            house.wire.close()
            sandbox.down(container=True, keep_data=False)
            shutil.rmtree(base)


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """The one `Deadline` that is the default of many signatures, shortened in place."""
    kept = DEFAULT.idle, DEFAULT.connect
    for name, value in (("idle", IDLE_S), ("connect", CONNECT_S)):
        object.__setattr__(DEFAULT, name, value)
    try:
        yield
    finally:
        object.__setattr__(DEFAULT, "idle", kept[0])
        object.__setattr__(DEFAULT, "connect", kept[1])


def _no_bytecode(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]
