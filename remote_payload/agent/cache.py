"""Compiled kernels are kept per key: nothing stale is met, nothing is deleted under a live process.

Entries are content-addressed, and a wipe breaks whoever compiles then (sglang PR 34231, pytorch issue
167725): a new key means a new folder; `fresh` moves the old one aside, and deletes it once the new run is up.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
from typing import Any

from agent import procs, releases
from agent.call import Json, Roots
from agent.files import write_json

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TILELANG_CACHE_DIR": "tilelang",  # FlashQLA's compiler
}
# Which variant of a Triton kernel is the fastest is found out anew in every process unless it is written
# down: a minute for the delta rule's. fla's memo is off because its threads share it without a lock.
TUNING = {"TRITON_CACHE_AUTOTUNING": "1", "FLA_CACHE_RESULTS": "1", "FLA_DISABLE_TENSOR_CACHE": "1"}
_ASIDE = ".old-"


def make_key(versions: Json, gpus: Json, release_dir: str) -> Json:
    """`{key, parts}`: 16 hex digits over what may change a compiled kernel, and those parts to read."""
    sources = [
        (file["path"], file.get("sha256"))
        for file in releases.manifest(release_dir)
        if file["path"].startswith("trainer/")
    ]
    parts = {
        "versions": versions,
        "gpus": sorted({str(row.get("name")) for row in gpus["rows"]}),
        "driver": sorted({str(row.get("driver")) for row in gpus["rows"]}),
        "gpu_status": gpus["status"],
        "trainer": hashlib.sha256(json.dumps(sorted(sources)).encode()).hexdigest(),
    }
    return {
        "key": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16],
        "parts": parts,
    }


def choose(roots: Roots, made: Json, fresh: bool, nonce: str) -> Json:
    """Make the folder ready: `{key, dir, choice}`; choice is `kept`, `new` (there was none) or `fresh`."""
    folder = os.path.join(roots.cache, made["key"])
    known = os.path.isdir(folder)
    if known and fresh:
        os.rename(folder, folder + _ASIDE + nonce)
    for name in FOLDERS.values():
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    write_json(os.path.join(folder, "key.json"), made["parts"])
    return {"key": made["key"], "dir": folder, "choice": "fresh" if fresh else "kept" if known else "new"}


def environment(folder: str) -> dict[str, str]:
    """What makes torch, Triton and fla keep what they compiled and tuned in `folder`."""
    return {**{name: os.path.join(folder, sub) for name, sub in FOLDERS.items()}, **TUNING}


def drop_old(roots: Roots) -> None:
    """Delete what `fresh` moved aside. Nothing uses it: it was moved while no run was alive."""
    for path in glob.glob(os.path.join(glob.escape(roots.cache), "*" + _ASIDE + "*")):
        shutil.rmtree(path, ignore_errors=True)


def legacy(delete: bool) -> list[Json]:
    """Caches in torch's default places, which no run of ours uses: `{path, deleted, used_by[pids]}`.

    Deleted only on request, and only when no other process has torch loaded or a file of them mapped.
    """
    places = glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "torchinductor_*"))
    places += [os.path.expanduser("~/.triton/cache"), os.path.expanduser("~/.cache/torch_extensions")]
    found: list[Json] = []
    for path in places:
        if not os.path.isdir(path) or os.path.islink(path):
            continue
        users = _users(path) if delete else []
        if delete and not users:
            shutil.rmtree(path, ignore_errors=True)
        found.append({"path": path, "deleted": not os.path.exists(path), "used_by": users})
    return found


def _users(path: str) -> list[int]:
    ours: set[Any] = {proc.pid for found in procs.marked().values() for proc in found}
    marks = (path.encode() + b"/", b"/torch/lib/libtorch")
    users = []
    for pid in procs.pids():
        if pid not in ours and any(mark in procs.read_proc(pid, "maps") for mark in marks):
            users.append(pid)
    return users
