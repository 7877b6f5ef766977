"""The agent travels with each request: nothing is installed in a container, nothing there goes stale."""

from __future__ import annotations

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


def preamble() -> bytes:
    """What the one-line loader in the argument list reads first: the program's length, then the program."""
    program = script()
    return b"%d\n%s" % (len(program), program)


def _module(path: Path, folder: Path) -> str:
    parts = ["agent", *path.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
