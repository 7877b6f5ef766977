"""The workstation side of pctrun: it decides, speaks SSH and prints; nothing of it runs in a container."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.execution import ExecResult as ExecResult
    from controller.execution import execute as execute

# Invoke forbids bytecode for the sake of a tasks.py, and then compiles all of us at every start: 35 ms.
sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)

__all__ = ["ExecResult", "execute"]


def __getattr__(name: str) -> object:
    """Resolve the public names on first use: SSH and validation cost a command line nothing before that."""
    if name not in __all__:
        raise AttributeError(f"module 'controller' has no attribute '{name}'")
    from controller import execution

    return getattr(execution, name)
