"""A release is a content-hashed folder that never changes: its name, its place, its manifest's word."""

from __future__ import annotations

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
