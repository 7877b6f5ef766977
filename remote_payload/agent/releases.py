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


def named(roots: Roots, release: str) -> str:
    """The release that `current`, `previous`, a name or the beginning of one means, or a refusal."""
    if release in ("current", "previous"):
        found = linked(roots, release)
        if found is None:
            raise Refusal("no-release", f"there is no {release} release in {roots.opt}", _known(roots))
        return found
    matches = [name for name in names(roots) if release and name.startswith(release)]
    if len(matches) != 1:
        words = "several releases begin with" if matches else "there is no release"
        raise Refusal("no-release", f"{words} {release!r}", _known(roots))
    return matches[0]


def _known(roots: Roots) -> str:
    found = ", ".join(name[:8] for name in names(roots))
    return f"there are, newest first: {found}" if found else "invoke deploy"


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
