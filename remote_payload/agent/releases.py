"""Why: a release is a content-hashed folder that never changes: its name, its place, its manifest's word."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

from agent.call import Refusal, Roots
from agent.files import read_json

MANIFEST = "manifest.json"
_NAME = re.compile(r"[0-9a-z]{6,64}")


def check_name(release: str) -> str:
    if not _NAME.fullmatch(release):
        raise Refusal("usage", f"{release!r} is not a release: it must be 6 to 64 digits and small letters")
    return release


def names(roots: Roots) -> list[str]:
    """Every release, newest first."""
    found = []
    try:
        entries = list(os.scandir(roots.releases))
    except OSError:
        return []
    for entry in entries:
        if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            found.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def folder(roots: Roots, release: str) -> str:
    return os.path.join(roots.releases, release)


def linked(roots: Roots, link: str) -> str | None:
    """The release that `current` or `previous` points at, when it is there."""
    try:
        target = os.readlink(os.path.join(roots.opt, link))
    except OSError:
        return None
    name = os.path.basename(target)
    return name if _NAME.fullmatch(name) and os.path.isdir(folder(roots, name)) else None


def manifest(path: str) -> list[dict[str, Any]]:
    """The files that a release was made of; [] when its manifest is missing or damaged."""
    files = (read_json(os.path.join(path, MANIFEST)) or {}).get("files")
    if not isinstance(files, list):
        return []
    return [file for file in files if isinstance(file, dict) and isinstance(file.get("path"), str)]


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
    known = {file["path"] for file in wanted} | {MANIFEST}
    for base, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files + [name for name in folders if os.path.islink(os.path.join(base, name))]:
            relative = os.path.relpath(os.path.join(base, name), path)
            if relative not in known and not relative.endswith(".pyc"):
                wrong.append(relative)
    return sorted(set(wrong))
