"""Finds what a Python interpreter needs on disk, so that the container can see it at the same paths."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .errors import SandboxError

PROBE = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix]))"
PROBE_TIMEOUT_S = 30
ALREADY_INSIDE = (Path("/usr"), Path("/etc"))
OWN = (Path("/usr/local"),)  # of these, what a container with a /usr of its own does not have
LINKS_AT_MOST = 40  # what the kernel allows


def inspect(python: Path, *, own_usr: bool = False) -> tuple[Path, list[Path]]:
    """The interpreter's own path and the folders to bind read-only, parents before children.

    `own_usr`: the container has a /usr of its own, not this machine's.

    Covers a virtual environment, its base, and every place that a chain of links leads through (uv, pyenv).
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
        executable, *prefixes = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(
            f"{python} is not a working Python: {error}", "name another with --python"
        ) from None
    folders = {Path(prefix) for prefix in prefixes}
    link = Path(executable)
    for _ in range(LINKS_AT_MOST):
        folders.add(link.parent.parent)
        if not link.is_symlink():
            break
        link = link.parent / link.readlink()
    folders |= {folder.resolve() for folder in folders}
    return Path(executable), outermost(folders, own_usr)


def outermost(folders: set[Path], own_usr: bool = False) -> list[Path]:
    """Without those that another one, or the container itself, already holds."""
    missing = OWN if own_usr else ()
    kept: list[Path] = []
    for folder in sorted(folders, key=lambda path: len(path.parts)):
        inside = kept if _under(folder, missing) else (*ALREADY_INSIDE, *kept)
        if len(folder.parts) > 1 and not _under(folder, inside):
            kept.append(folder)
    return kept


def _under(folder: Path, others: Iterable[Path]) -> bool:
    return any(folder.is_relative_to(other) for other in others)
