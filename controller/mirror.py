"""Records of runs outlive their container: what was seen of each run is kept beside the inventory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from controller import inventory
from controller.inventory import Box

Json = dict[str, Any]

_FOLDER = ".pctrun"
_ID = re.compile(r"r-\d{4,}")


def folder(box: Box) -> Path:
    """`$PCTRUN_STATE`/runs/BOX, else `.pctrun`/runs/BOX beside inventory.yaml."""
    named = os.environ.get("PCTRUN_STATE")
    base = Path(named).expanduser() if named else inventory.find().parent / _FOLDER
    return base / "runs" / re.sub(r"[^\w.-]", "_", box.name)


def keep(box: Box, entries: Iterable[Json]) -> None:
    """Remember what was seen of these runs. A folder that cannot be written costs no task."""
    with contextlib.suppress(OSError):
        place = folder(box)
        place.mkdir(parents=True, exist_ok=True)
        for entry in entries:
            created = (entry.get("record") or {}).get("created")
            if created is None or not _ID.fullmatch(str(entry.get("id"))):
                continue  # without its time it could not be told from a run of an earlier container
            path = place / f"{entry['id']}-{int(created)}.json"
            known = {key: value for key, value in entry.items() if value is not None or key == "pin"}
            aside = path.with_name(f".{path.name}.{os.getpid()}")
            aside.write_text(json.dumps({**_read(path), **known, "seen_at": time.time()}), "utf-8")
            aside.replace(path)


def read(box: Box) -> list[Json]:
    """All that is remembered of this box's runs, newest first."""
    try:
        found = [_read(path) for path in folder(box).glob("r-*.json")]
    except OSError:
        return []
    whole = [entry for entry in found if entry.get("id") and (entry.get("record") or {}).get("created")]
    return sorted(whole, key=lambda entry: float(entry["record"]["created"]), reverse=True)


def _read(path: Path) -> Json:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
