"""A disk or a copy that changes one bit ruins a training in silence: every file's hash lies beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

READERS = 2  # a checkpoint has two large files
CHUNK = 4 << 20


def of(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`{name: {bytes, sha256}}`. Raises OSError.

    sha256 as `fetch` has it: 1.6 GiB/s a file where the processor helps, without the interpreter lock."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="checksum") as pool:
        return dict(zip(names, pool.map(lambda name: _one(folder / name), names), strict=True))


def _one(path: Path) -> dict[str, Any]:
    digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(view[:got])
            size += got
    return {"bytes": size, "sha256": digest.hexdigest()}


def damage(folder: Path, wanted: Mapping[str, Any]) -> str | None:
    """What is wrong with the first file of `folder` that is not as `wanted` (what `of` gave) says, in words;
    None when all are whole."""
    for name, facts in wanted.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != facts["bytes"]:
            return f"{name} has {size:,} of {facts['bytes']:,} bytes"
    found = of(folder, list(wanted))
    differ = next((name for name, facts in wanted.items() if facts != found[name]), None)
    return differ and f"{differ}: its checksum differs"
