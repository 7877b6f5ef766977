"""Where the sandbox lies, what it is set to, and that one command at a time changes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from controller.project import PROJECT, inventory_path, is_checkout

from .errors import SandboxError
from .pct.host import Host, read_pairs

SOURCES = Path(__file__).resolve().parent
USER, ADDRESS = "root", "127.0.0.1"  # of the SSH server
OWN_FOLDER = "set PCTRUN_SANDBOX to a folder of your own"


def sandbox_dir() -> Path:
    """`$PCTRUN_SANDBOX`, else `.sandbox` in the checkout; of an installed copy beside inventory.yaml."""
    named = os.environ.get("PCTRUN_SANDBOX")
    if named:
        return Path(named).absolute()
    if is_checkout():
        return PROJECT / ".sandbox"
    inventory = inventory_path()
    return (inventory.absolute().parent if inventory else Path.cwd()) / ".sandbox"


def settings(host: Host) -> dict[str, str]:
    """`realistic` (1 or 0), `python` (path inside the container), and, if someone set it, `lang`."""
    return read_pairs(host.settings) if Path(host.settings).exists() else {}


def refuse_foreign(folder: Path) -> None:
    """Keys and name spaces belong to one user; root is no exception."""
    if folder.exists() and (owner := folder.stat().st_uid) != os.geteuid():
        raise SandboxError(f"{folder} belongs to another user (uid {owner})", OWN_FOLDER)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time; a second one waits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SandboxError(f"cannot write to {folder}: {error.strerror}", OWN_FOLDER) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def size_bytes(folder: Path) -> int:
    """Disk space in use under `folder`, each file counted once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                facts = Path(parent, name).lstat()
                seen[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(seen.values())
