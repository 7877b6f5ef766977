"""The agent travels with each request: nothing is installed in a container, nothing there goes stale."""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path

from controller.errors import PctrunError
from controller.release import payload_root


@cache
def script() -> bytes:
    """One Python program: every module of the agent as text, then `agent/boot.py` that imports them."""
    folder = payload_root() / "agent"
    sources = {_module(path, folder): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    if "agent.boot" not in sources:
        raise PctrunError(f"no agent in {folder}", "the checkout is incomplete: git status")
    boot = sources.pop("agent.boot")
    return f"SOURCES = {sources!a}\n{boot}".encode()


@cache
def preamble() -> bytes:
    """What the one-line loader in the argument list reads first: a length, then the program, deflated.

    About 100 KiB become 30: on a line of 10 Mbit/s that is 60 ms of each command.
    """
    program = zlib.compress(script(), 9)
    return b"%d\n%s" % (len(program), program)


def _module(path: Path, folder: Path) -> str:
    parts = ["agent", *path.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
