"""Which folder is the user's project: the one with inventory.yaml, in a checkout or for an installed copy."""

from __future__ import annotations

import os
from pathlib import Path

FILE_NAME = "inventory.yaml"
PROJECT = Path(__file__).resolve().parent.parent  # the checkout; of an installed copy its site-packages


def is_checkout() -> bool:
    """Whether this is a tree that one works in, and no installed copy."""
    return (PROJECT / "pyproject.toml").is_file()


def inventory_path() -> Path | None:
    """`PCTRUN_INVENTORY`, else the nearest inventory.yaml upward from here, else the checkout's own."""
    named = os.environ.get("PCTRUN_INVENTORY")
    if named:
        return Path(named).expanduser()
    here = Path.cwd()
    found = (folder / FILE_NAME for folder in (here, *here.parents, PROJECT))
    return next((path for path in found if path.is_file()), None)


def is_borrowed(inventory: Path) -> bool:
    """Whether it is the checkout's for want of one where we are: nobody here has named it."""
    here = Path.cwd()
    return not os.environ.get("PCTRUN_INVENTORY") and inventory.parent not in (here, *here.parents)
