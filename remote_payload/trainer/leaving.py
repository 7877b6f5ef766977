"""How a process ends: one of several that failed must neither hang nor abort in its groups' farewell."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """Exit with `code`. One of several processes that failed ends at once, and the others notice the closed
    connections: NCCL's farewell waits for all of them, gloo's threads may abort Python while it shuts down
    (see `World.close`), and torchrun would be told of -6 in place of `code`."""
    if at_once or (code and int(os.environ.get("WORLD_SIZE", 1)) > 1):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
