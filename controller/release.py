"""The payload as a content hash and a tar stream: what runs in a container has a name that cannot lie."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller import project
from controller.errors import PctrunError, Usage

PAYLOAD = "remote_payload"
_PARTS = ("agent", "trainer", "recipes")
_PIECE = 255 * 1024  # of a file at once: eight packets, the last of them nearly full
_HASH_CHARS = 16
_BLOCK = 512  # of a tar
_TICK_NS = (
    50_000_000  # a file that changes twice within the kernel's tick (10 ms at most) has one change time
)


@dataclass(frozen=True)
class Entry:
    """One file: `path` relative to the payload with /, `mode` 0o644 or 0o755, `bytes` its size.

    `changed_ns`: its change time when it was hashed, 0 where that was too short ago to tell a later change.
    """

    path: str
    sha256: str
    bytes: int
    mode: int
    changed_ns: int = field(compare=False)


@dataclass(frozen=True)
class Release:
    """`id` is the first 16 hex digits of the hash over every path, mode and content."""

    id: str
    root: Path
    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def manifest(self) -> list[dict[str, object]]:
        return manifest_of(self.entries)


def manifest_of(files: Iterable[Entry]) -> list[dict[str, object]]:
    """The files as the agent is told of them."""
    return [
        {"path": file.path, "sha256": file.sha256, "bytes": file.bytes, "mode": file.mode} for file in files
    ]


def own_payload() -> Path:
    """The payload that came with this controller: `remote_payload/` beside it, also when installed."""
    return project.PROJECT / PAYLOAD


def payload_root() -> Path:
    """What is deployed: `remote_payload/` beside inventory.yaml when there is one, else what came with us.

    Raises Usage when the one beside inventory.yaml is no whole payload.
    """
    inventory = project.inventory_path()
    beside = inventory.resolve().parent / PAYLOAD if inventory else own_payload()
    if not beside.is_dir():
        return own_payload()
    missing = [name for name in _PARTS if not (beside / name).is_dir()]
    if missing:
        raise Usage(
            f"{beside} is no whole payload: there is no {missing[0]}/",
            "move it away; pctrun init --payload makes a whole one",
        )
    return beside


def scan(root: Path | None = None) -> Release:
    """Hash the payload. Hidden files, `__pycache__` and `*.pyc` do not travel."""
    root = root or payload_root()
    entries = tuple(entry(path, root) for path in _files(root))
    if not entries:
        raise Usage(f"nothing to deploy in {root}")
    digest = hashlib.sha256()
    for each in entries:
        digest.update(f"{each.path}\0{each.mode:o}\0{each.sha256}\n".encode())
    return Release(digest.hexdigest()[:_HASH_CHARS], root, entries)


def tar(release: Release, wanted: Sequence[str]) -> Iterator[bytes]:
    """The wanted files as a tar, a piece at a time; equal content gives equal bytes.

    Raises PctrunError when a file is no longer the one that was hashed.
    """
    by_path = {each.path: each for each in release.entries}
    unknown = [path for path in wanted if path not in by_path]
    if unknown:
        raise PctrunError(f"the container asks for {unknown[0]}, which is not in release {release.id}")
    yield from stream(release.root, [(by_path[path], 0) for path in wanted])


def stream(root: Path, files: Iterable[tuple[Entry, int]]) -> Iterator[bytes]:
    """Files below `root` as a tar, each from the byte that is named with it."""
    import tarfile  # 4 ms that only a changed deploy pays

    for file, start in files:
        header = tarfile.TarInfo(file.path)  # owner 0, group 0, time 0
        header.size, header.mode = file.bytes - start, file.mode
        yield header.tobuf(tarfile.PAX_FORMAT)
        yield from _content(root / file.path, file, start)
        yield b"\0" * (-header.size % _BLOCK)
    yield b"\0" * (2 * _BLOCK)


def tar_bytes(release: Release, wanted: Iterable[str]) -> int:
    """The size of that tar, for plans and progress (a path of up to 100 characters has one header block)."""
    sizes = {each.path: each.bytes for each in release.entries}
    return sum(_BLOCK + -(-sizes[path] // _BLOCK) * _BLOCK for path in wanted) + 2 * _BLOCK


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink():
            raise Usage(f"the payload holds a symbolic link: {path}", "replace it by the file itself")
        if path.is_file():
            yield path


def entry(path: Path, root: Path) -> Entry:
    """One file, hashed."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        settled = facts.st_ctime_ns < time.time_ns() - _TICK_NS
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    mode = 0o755 if facts.st_mode & 0o100 else 0o644
    name = path.relative_to(root).as_posix()
    return Entry(name, digest.hexdigest(), size, mode, facts.st_ctime_ns if settled else 0)


def _content(path: Path, known: Entry, start: int) -> Iterator[bytes]:
    """Its bytes from `start`. A file whose change time tells is not hashed again: 0.06 s of 100 MiB."""
    digest, size = None if known.changed_ns else hashlib.sha256(), 0
    with path.open("rb") as file:
        while size <= known.bytes and (piece := file.read(_PIECE)):
            if digest:
                digest.update(piece)
            fresh = piece[max(0, start - size) :]
            size += len(piece)
            if size <= known.bytes and fresh:
                yield fresh
        if digest:
            same = digest.hexdigest() == known.sha256
        else:
            same = os.fstat(file.fileno()).st_ctime_ns == known.changed_ns
    if size != known.bytes or not same:
        raise PctrunError(f"{known.path} changed while it was being sent", "run it again")
