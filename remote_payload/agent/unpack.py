"""Nothing of a stream is believed: names, sizes and hashes are the manifest's, or nothing is kept."""

from __future__ import annotations

import hashlib
import os
import tarfile
from typing import IO, Any, Tuple

from agent import releases, tarstream
from agent.call import Json, Refusal, Roots
from agent.files import placed

_SHA = frozenset("0123456789abcdef")
Stamp = Tuple[int, int, int]


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
        for member, content in tarstream.members(stdin):
            name = member.name
            if name not in expected or name in done or not member.isreg():
                raise Refusal("verify", f"the stream holds {name!r:.120}, which the manifest does not want")
            write_verified(content, folder, expected[name])
            done.add(name)
            size += member.size
    except (tarfile.TarError, EOFError) as error:
        raise Refusal(
            "verify", f"the stream of files ended early or is damaged ({error})", "deploy again"
        ) from None
    return len(done), size


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


def write_verified(content: tarstream.Readable, folder: str, file: Json) -> None:
    """Write one file, its mode as in the manifest, to the disk; refuses a wrong size or hash."""
    path = os.path.join(folder, file["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    sha = hashlib.sha256()
    try:
        with open(path, "xb") as output:
            size = tarstream.copy(content, sha, output)
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


def stamps(path: str, wanted: list[Json]) -> dict[str, Stamp]:
    """Which file lies where, and when it last changed: the kernel sets that time, nobody can set it back."""
    return {file["path"]: _stamp(os.lstat(os.path.join(path, file["path"]))) for file in wanted}


def _stamp(facts: os.stat_result) -> Stamp:
    return facts.st_ino, facts.st_size, facts.st_ctime_ns


def differences(path: str, wanted: list[Json], verified: dict[str, Stamp] | None = None) -> list[str]:
    """Files that are not as the manifest says, or not in it. Byte code is Python's own business.

    A file that still has the stamp under which it was `verified` is not read again.
    """
    wrong = []
    for file in wanted:
        here = os.path.join(path, file["path"])
        try:
            facts = os.lstat(here)
            same = _stamp(facts) == (verified or {}).get(file["path"]) or (
                facts.st_size == file["bytes"] and digest(here) == file["sha256"]
            )
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
