"""Nothing of a stream is believed: names, sizes and hashes are the manifest's, or nothing is kept."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import tarfile
from types import FrameType
from typing import IO, Any, cast

from agent import releases
from agent.call import Json, Refusal, Roots
from agent.files import placed

IDLE_S = 60  # without a byte for so long the connection is dead, and the lock must not be held for it
_BLOCK = 1 << 20  # bytes at once; tarfile's own 10 KiB makes 100 MiB take 1.0 s instead of 0.35
_SHA = frozenset("0123456789abcdef")


def check_manifest(given: list[Any]) -> list[Json]:
    """The manifest's files, every field checked; refuses a name that could leave the release's folder."""
    seen: set[str] = set()
    for file in given:
        if not isinstance(file, dict):
            raise Refusal("usage", f"the manifest holds {file!r:.60}, which is not an object")
        path, sha, size, mode = (file.get(key) for key in ("path", "sha256", "bytes", "mode"))
        if not isinstance(path, str) or not _is_safe(path) or path in seen:
            raise Refusal(
                "usage", f"the manifest's path {path!r:.120} is not a plain relative name, or is there twice"
            )
        if not (isinstance(sha, str) and len(sha) == 64 and _SHA.issuperset(sha)):
            raise Refusal("usage", f"the manifest's sha256 of {path} is not 64 hex digits")
        if type(size) is not int or size < 0 or type(mode) is not int or not 0 <= mode <= 0o777:
            raise Refusal(
                "usage", f"the manifest's bytes or mode of {path} is not a whole number in its range"
            )
        seen.add(path)
    for path in seen:
        parts = path.split("/")
        if any("/".join(parts[:depth]) in seen for depth in range(1, len(parts))):
            raise Refusal("usage", f"the manifest's path {path!r:.120} lies below another file")
    return given


def _is_safe(path: str) -> bool:
    if "\0" in path or path == releases.MANIFEST:
        return False
    parts = path.split("/")
    return "__pycache__" not in parts and all(part not in ("", ".", "..") for part in parts)


def find_copies(roots: Roots, manifest: list[Json]) -> dict[str, str]:
    """What an earlier release has already: path -> file to copy. Hashed here, and again when copied."""
    wanted = {file["sha256"]: file["bytes"] for file in manifest}
    found: dict[str, str] = {}
    for name in releases.names(roots):
        folder = releases.folder(roots, name)
        for file in releases.manifest(folder):
            sha = file.get("sha256")
            if sha not in wanted or sha in found or not _is_safe(file["path"]):
                continue
            path = os.path.join(folder, file["path"])
            if digest(path) == sha:
                found[sha] = path
    return {file["path"]: found[file["sha256"]] for file in manifest if file["sha256"] in found}


def receive(stdin: IO[bytes], folder: str, manifest: list[Json]) -> tuple[int, int]:
    """Unpack a tar stream into `folder`; (files, bytes). Refuses what the manifest does not say."""
    expected = {file["path"]: file for file in manifest}
    done: set[str] = set()
    size = 0
    try:
        with open_stream(stdin) as tar:
            for member in tar:
                name = member.name
                if name not in expected or name in done or not member.isreg():
                    raise Refusal(
                        "verify", f"the stream holds {name!r:.120}, which the manifest does not want"
                    )
                content = tar.extractfile(member)
                assert content is not None  # a regular file has content
                write_verified(content, folder, expected[name])
                done.add(name)
                size += member.size
    except (tarfile.TarError, EOFError) as error:
        raise Refusal(
            "verify", f"the stream of files ended early or is damaged ({error})", "deploy again"
        ) from None
    return len(done), size


def open_stream(stdin: IO[bytes]) -> tarfile.TarFile:
    """The tar on our stdin, read to its end."""
    return tarfile.open(fileobj=cast(IO[bytes], Impatient(stdin)), mode="r|", bufsize=_BLOCK)


def copy_rest(folder: str, manifest: list[Json], sources: dict[str, str]) -> None:
    """Files that did not travel, from the releases that have them."""
    for file in manifest:
        path = file["path"]
        if os.path.exists(os.path.join(folder, path)):
            continue
        if path not in sources:
            raise Refusal("verify", f"{path} was not in the stream", "deploy again")
        with open(sources[path], "rb") as content:
            write_verified(content, folder, file)


def write_verified(content: IO[bytes], folder: str, file: Json) -> None:
    """Write one file, its mode as in the manifest, to the disk; refuses a wrong size or hash."""
    path = os.path.join(folder, file["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    sha, size = hashlib.sha256(), 0
    try:
        with open(path, "xb") as output:
            while True:
                block = content.read(_BLOCK)
                if not block:
                    break
                sha.update(block)
                size += len(block)
                output.write(block)
            output.flush()
            os.fchmod(output.fileno(), file["mode"])
            os.fsync(output.fileno())
    except OSError as error:
        raise placed(error, path) from None
    if size != file["bytes"] or sha.hexdigest() != file["sha256"]:
        raise Refusal(
            "verify", f"{file['path']} arrived damaged ({size} of {file['bytes']} bytes)", "deploy again"
        )


def digest(path: str) -> str:
    """sha256 of a regular file in hex; empty for anything else (a link, a folder, nothing)."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    sha = hashlib.sha256()
    try:
        while True:
            block = os.read(handle, 1 << 20)
            if not block:
                return sha.hexdigest()
            sha.update(block)
    except OSError:
        return ""
    finally:
        os.close(handle)


def differences(path: str, wanted: list[dict[str, Any]]) -> list[str]:
    """Files that are not as the manifest says, or not in it. Byte code is Python's own business."""
    wrong = []
    for file in wanted:
        here = os.path.join(path, file["path"])
        try:
            same = os.lstat(here).st_size == file["bytes"] and digest(here) == file["sha256"]
        except OSError:
            same = False
        if not same:
            wrong.append(file["path"])
    known = {file["path"] for file in wanted} | {releases.MANIFEST}
    for base, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files + [name for name in folders if os.path.islink(os.path.join(base, name))]:
            relative = os.path.relpath(os.path.join(base, name), path)
            if relative not in known and not relative.endswith(".pyc"):
                wrong.append(relative)
    return sorted(set(wrong))


def sync_tree(folder: str) -> None:
    """The folders' own entries on the disk; the files were synced as they were written."""
    for base, _, _ in os.walk(folder):
        sync_folder(base)


def sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Impatient:
    """A stream that gives up when no byte comes for IDLE_S: after a lost network the pipe may never close."""

    def __init__(self, source: IO[bytes]) -> None:
        self.source = cast(io.BufferedReader, source)

    def read(self, size: int) -> bytes:
        def give_up(number: int, frame: FrameType | None) -> None:
            raise Refusal("verify", f"the stream of files stood still for {IDLE_S} s", "deploy again")

        before = signal.signal(signal.SIGALRM, give_up)
        pieces = []
        try:
            while size > 0:
                signal.alarm(IDLE_S)
                piece = self.source.read1(size)  # what is there: a slow line is no dead one
                if not piece:
                    break
                pieces.append(piece)
                size -= len(piece)
            return b"".join(pieces)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
