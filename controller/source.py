"""Which commit a payload was, and whether it was changed since: a release's hash alone finds no source."""

from __future__ import annotations

import hashlib
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from controller import project

_TIMEOUT_S = 20.0


def of(folder: Path) -> dict[str, Any] | None:
    """`{commit, dirty}` of the git tree that holds `folder`; `dirty` is 16 hex digits over what differs from
    the commit below `folder`, None when nothing does. None without git, or outside a repository.

    The payload of an installed copy has `pctrun VERSION` for a commit: git around it knows nothing of it."""
    if not project.is_checkout() and folder.resolve().parent == project.PROJECT:
        return {"commit": f"pctrun {metadata.version('pctrun')}", "dirty": None}
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color", "--binary", "--", ".")
    loose = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", ".")
    if changed is None or loose is None:
        return None
    digest = hashlib.sha256(changed)
    for name in sorted(filter(None, loose.split(b"\0"))):
        digest.update(name + b"\0" + _content(folder / name.decode("utf-8", "surrogateescape")))
    dirty = digest.hexdigest()[:16] if changed or loose else None
    return {"commit": commit.decode().strip(), "dirty": dirty}


def text(source: dict[str, Any] | None) -> str:
    """`1a2b3c4d5e6f`, with `+ diff 99aa…` when it was changed; `not known` outside git."""
    if not source or not source.get("commit"):
        return "not known"
    diff = f" + diff {source['dirty']}" if source.get("dirty") else ""
    name = str(source["commit"])
    return f"{name if ' ' in name else name[:12]}{diff}"


def _git(folder: Path, *words: str) -> bytes | None:
    """What git answers; None when it cannot."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it went while we looked
