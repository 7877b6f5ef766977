"""The tests drive the agent as the controller does: its sources on stdin, a request line, frames back.

Every test gets a box of its own: short root paths (a tmux socket's path has 107 bytes) and a full clean-up.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from agent import procs

AGENT = Path(__file__).resolve().parents[2] / "remote_payload" / "agent"
BOOT = 'import sys;b=sys.stdin.buffer;exec(compile(b.read(int(b.readline())),"pctrun","exec"))'


@dataclass
class Answer:
    """All frames of one call; `end` is None when the agent was cut off."""

    notes: list[dict[str, Any]] = field(default_factory=list)
    part: list[dict[str, Any]] = field(default_factory=list)
    out: bytes = b""
    err: bytes = b""
    end: dict[str, Any] | None = None
    stderr: bytes = b""
    status: int | None = None

    @property
    def result(self) -> dict[str, Any]:
        assert self.end and self.end["ok"], (self.end, self.stderr)
        return self.end["result"]

    @property
    def error(self) -> dict[str, Any]:
        assert self.end and not self.end["ok"], (self.end, self.stderr)
        return self.end["error"]


def bundle() -> bytes:
    """The agent as one script: the SOURCES line, then the loader's text."""
    sources = {
        "agent" if path.stem == "__init__" else f"agent.{path.stem}": path.read_text()
        for path in AGENT.glob("*.py")
        if path.stem not in ("boot", "__main__")
    }
    return f"SOURCES = {sources!r}\n{(AGENT / 'boot.py').read_text()}".encode()


def request_bytes(
    nonce: str, roots: dict[str, str], verb: str, args: dict[str, Any], user: str, private: dict[str, Any]
) -> bytes:
    script = bundle()
    request = {
        "schema": 1,
        "nonce": nonce,
        "verb": verb,
        "args": args,
        "roots": roots,
        "operator": {"user": user, "host": "desk"},
        **({"private": private} if private else {}),
    }
    return b"%d\n%s%s\n" % (len(script), script, json.dumps(request).encode())


class Agent(subprocess.Popen[bytes]):
    """The agent's process; its frames must carry the request's nonce."""

    nonce = ""
    begun = False  # its first word, an empty line, was read


def spawn(environment: dict[str, str], python: str = sys.executable) -> Agent:
    """The agent as `pct exec` starts it: a bare environment and SIGPIPE ignored."""
    return Agent(
        [python, "-I", "-c", BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd="/",
        restore_signals=False,  # Python itself ignores SIGPIPE, and so the child does
    )


def next_frame(process: Agent) -> tuple[str, bytes] | None:
    """The next frame, or None at the end of the stream; anything else on the stream fails the test."""
    stream = process.stdout
    header = stream.readline()
    if header == b"\n" and not process.begun:
        process.begun = True
        header = stream.readline()
    if not header:
        return None
    mark, nonce, kind, length = header.split()
    assert (mark, nonce) == (b"@pctrun", process.nonce.encode()), header
    data = stream.read(int(length))
    assert stream.read(1) == b"\n"
    return kind.decode(), data


def collect(process: Agent) -> Answer:
    answer = Answer()
    while frame := next_frame(process):
        kind, data = frame
        assert answer.end is None, "a frame after the end"
        if kind == "note":
            answer.notes.append(json.loads(data))
        elif kind == "part":
            answer.part.append(json.loads(data))
        elif kind == "end":
            answer.end = json.loads(data)
        else:
            setattr(answer, kind, getattr(answer, kind) + data)
    answer.stderr = process.stderr.read()
    answer.status = process.wait(30)
    for pipe in (process.stdout, process.stderr, process.stdin):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    return answer


def manifest_of(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "mode": 0o644}
        for path, data in sorted(files.items())
    ]


def release_of(files: dict[str, bytes]) -> str:
    return hashlib.sha256(json.dumps(manifest_of(files)).encode()).hexdigest()[:16]


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _write(stdin: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        stdin.write(data)
        stdin.close()


@dataclass
class Box:
    """One pctrun in a folder of its own."""

    base: Path
    roots: dict[str, str]
    environment: dict[str, str]
    python: str = sys.executable
    private: dict[str, Any] = field(default_factory=dict)  # of every request

    bundle = staticmethod(bundle)
    manifest_of = staticmethod(manifest_of)
    release_of = staticmethod(release_of)
    tar_of = staticmethod(tar_of)
    collect = staticmethod(collect)
    next_frame = staticmethod(next_frame)

    def spawn(self) -> Agent:
        return spawn(self.environment, self.python)

    def begin(self, verb: str, args: dict[str, Any] | None = None, user: str = "ana") -> Agent:
        """Send the request and return with stdin still open."""
        process = self.spawn()
        process.nonce = secrets.token_hex(8)
        process.stdin.write(request_bytes(process.nonce, self.roots, verb, args or {}, user, self.private))
        process.stdin.flush()
        return process

    def call(self, verb: str, *, stream_bytes: bytes = b"", user: str = "ana", **args: Any) -> Answer:
        """One whole call."""
        process = self.begin(verb, args, user)
        writer = threading.Thread(target=_write, args=(process.stdin, stream_bytes))
        writer.start()
        answer = collect(process)
        writer.join()
        return answer

    def run_dir(self, run: str) -> Path:
        return Path(self.roots["lib"]) / "runs" / run

    # -- a release of the real agent and the stand-in trainer ------------------------------------------------

    def payload(self, **changes: str | None) -> dict[str, bytes]:
        """Path -> content; `changes` replaces files, or leaves them out with None."""
        files = {f"agent/{path.name}": path.read_bytes() for path in AGENT.glob("*.py")}
        standin = Path(__file__).with_name("standin")
        for path in standin.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files[path.relative_to(standin).as_posix()] = path.read_bytes()
        for name, text in changes.items():
            if text is None:
                del files[name]
            else:
                files[name] = text.encode()
        return files

    def release_args(self, files: dict[str, bytes]) -> dict[str, Any]:
        return {"release": release_of(files), "manifest": manifest_of(files), "python": self.python}

    def deploy(self, files: dict[str, bytes] | None = None, **args: Any) -> Answer:
        """Ask, and stream what is missing, as the controller does."""
        files = self.payload() if files is None else files
        wanted = {**self.release_args(files), **args}
        asked = self.call("deploy", **wanted)
        if not asked.end["ok"] or asked.result["outcome"] != "missing":
            return asked
        stream = tar_of({path: files[path] for path in asked.result["want"]})
        return self.call("deploy", stream_bytes=stream, **wanted, stream=True)

    def start(
        self, behave: str = "train", verb: str = "start", recipe: dict[str, Any] | None = None, **args: Any
    ):
        overrides = {"behave": behave, **(recipe or {})}
        return self.call(verb, recipe="tiny", overrides=overrides, python=self.python, **args)

    def current(self) -> str | None:
        link = Path(self.roots["opt"]) / "current"
        return link.resolve().name if link.exists() else None

    def file(self, run: str, name: str) -> dict[str, Any]:
        return json.loads((self.run_dir(run) / name).read_text())

    def wait_for(self, fact: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """Look until `fact` is true, and return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = fact()
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s: {what}")

    def scope(self, run: str) -> list[procs.Proc]:
        return procs.scope(str(self.run_dir(run)))

    def clean_up(self) -> None:
        """End what the test's runs left, by their marker, and the box's own tmux server."""
        self.wait_for(self._nothing_is_left, "the end of what the test's runs left")
        self.clean_up_tmux()

    def _nothing_is_left(self) -> bool:
        found = [proc for folder, each in procs.marked().items() if self._owns(folder) for proc in each]
        for proc in found:
            procs.send(proc, signal.SIGKILL)
        return not found

    def _owns(self, folder: str) -> bool:
        return folder.startswith(self.roots["lib"])

    def clean_up_tmux(self) -> None:
        environment = {**os.environ, "TMUX_TMPDIR": f"{self.roots['run']}/tmux"}
        subprocess.run(["tmux", "-L", "pctrun", "kill-server"], env=environment, capture_output=True)


def make_box() -> Box:
    base = Path(tempfile.mkdtemp(prefix="pa", dir="/tmp")).resolve()
    roots = {name: f"{base}/{name}" for name in ("opt", "lib", "cache", "run")}
    (base / "home").mkdir()
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": f"{base}/home",
        "TMPDIR": f"{base}",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
    }
    return Box(base, roots, environment)


def remove_box(box: Box) -> None:
    box.clean_up()
    box.wait_for(lambda: _removed(box.base), f"{box.base} can be removed")


def _removed(folder: Path) -> bool:
    """False while a process without the marker, an agent that was killed or a tmux server, still writes."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return not folder.exists()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


@pytest.fixture
def box() -> Iterator[Box]:
    made = make_box()
    yield made
    remove_box(made)


@pytest.fixture(scope="session")
def deployed_opt() -> Iterator[str]:
    """One real deploy, whose result each test that only needs a release copies."""
    made = make_box()
    assert made.deploy().result["outcome"] == "deployed"
    yield made.roots["opt"]
    remove_box(made)


@pytest.fixture
def ready(box: Box, deployed_opt: str) -> Box:
    """A box with a release."""
    shutil.copytree(deployed_opt, box.roots["opt"], symlinks=True)
    return box
