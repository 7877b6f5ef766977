"""The payload as a content hash and a tar stream: what runs in a container has a name that cannot lie."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from controller.errors import PctrunError, Usage

_PIECE = 256 * 1024
_HASH_CHARS = 16


@dataclass(frozen=True)
class Entry:
    """One file: `path` relative to the payload with /, `mode` 0o644 or 0o755, `bytes` its size."""

    path: str
    sha256: str
    bytes: int
    mode: int


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
        return [asdict(entry) for entry in self.entries]


def payload_root() -> Path:
    """`remote_payload/` beside `controller/`, in a checkout and in an installed wheel."""
    return Path(__file__).resolve().parent.parent / "remote_payload"


def scan(root: Path | None = None) -> Release:
    """Hash the payload. Hidden files, `__pycache__` and `*.pyc` do not travel."""
    root = root or payload_root()
    entries = tuple(_entry(path, root) for path in _files(root))
    if not entries:
        raise Usage(f"nothing to deploy in {root}")
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.path}\0{entry.mode:o}\0{entry.sha256}\n".encode())
    return Release(digest.hexdigest()[:_HASH_CHARS], root, entries)


def tar(release: Release, wanted: Sequence[str]) -> Iterator[bytes]:
    """The wanted files as a tar, a piece at a time; equal content gives equal bytes.

    Raises PctrunError when a file is no longer the one that was hashed.
    """
    by_path = {entry.path: entry for entry in release.entries}
    unknown = [path for path in wanted if path not in by_path]
    if unknown:
        raise PctrunError(f"the container asks for {unknown[0]}, which is not in release {release.id}")
    for path in wanted:
        entry = by_path[path]
        header = tarfile.TarInfo(path)  # owner 0, group 0, time 0
        header.size, header.mode = entry.bytes, entry.mode
        yield header.tobuf(tarfile.PAX_FORMAT)
        yield from _content(release.root / path, entry)
        yield b"\0" * (-entry.bytes % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def tar_bytes(release: Release, wanted: Iterable[str]) -> int:
    """The size of that tar, for plans and progress (a path of up to 100 characters has one header block)."""
    sizes = {entry.path: entry.bytes for entry in release.entries}
    block = tarfile.BLOCKSIZE
    return sum(block + -(-sizes[path] // block) * block for path in wanted) + 2 * block


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink():
            raise Usage(f"the payload holds a symbolic link: {path}", "replace it by the file itself")
        if path.is_file():
            yield path


def _entry(path: Path, root: Path) -> Entry:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    return Entry(path.relative_to(root).as_posix(), digest.hexdigest(), size, mode)


def _content(path: Path, entry: Entry) -> Iterator[bytes]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while size <= entry.bytes and (piece := file.read(_PIECE)):
            digest.update(piece)
            size += len(piece)
            if size <= entry.bytes:
                yield piece
    if size != entry.bytes or digest.hexdigest() != entry.sha256:
        raise PctrunError(f"{entry.path} changed while it was being sent", "deploy again")
