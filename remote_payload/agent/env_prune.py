"""Environments are gigabytes each: those may go that no link, live run, pinned run or process uses."""

from __future__ import annotations

import os
import shutil

from agent import environments, lock
from agent.call import Args, Call, Json, Refusal, Roots
from agent.files import tree_bytes

ARGS: Args = {
    "keep": (int, 0, "how many of the newest stay besides those in use"),
    "envs": (list, [], "remove exactly these ids, of those that may go; without them only look"),
}


def run(call: Call) -> Json:
    """`{doomed[{id, name, created, bytes}], kept{id: why}, freed_bytes, removed[]}`; half-built ones go."""
    roots, chosen = call.roots, call.args["envs"]
    with lock.hold(call, environments.LOCK), lock.hold(call):
        kept = _keepers(roots, call.args["keep"])
        doomed = [each for each in _everything(roots) if each["id"] not in kept]
        ids = [each["id"] for each in doomed]
        changed = [each for each in chosen if each not in ids]
        if changed:
            why = kept.get(str(changed[0]), "gone")
            raise Refusal("usage", f"{changed[0]} is not to be removed any more: {why}", "look again")
        listed = [each for each in doomed if not chosen or each["id"] in chosen]
        for each in chosen:
            _remove(call, each)
    freed = sum(each["bytes"] for each in listed)
    return {"doomed": listed, "kept": kept, "freed_bytes": freed, "removed": list(chosen)}


def _keepers(roots: Roots, keep: int) -> dict[str, str]:
    kept = environments.users(roots)
    for each in environments.whole(roots)[:keep]:
        kept.setdefault(str(each["id"]), f"one of the newest {keep}")
    return kept


def _everything(roots: Roots) -> list[Json]:
    rows = [
        {key: each.get(key) for key in ("id", "name", "created", "bytes")}
        for each in environments.whole(roots)
    ]
    for env in environments.half_built(roots):
        size = tree_bytes(environments.folder(roots, env))[0]
        rows.append({"id": env, "name": None, "created": None, "bytes": size})
    return rows


def _remove(call: Call, env: str) -> None:
    """The record goes first: a removal that is cut short leaves a half-built one, never one with holes."""
    path = environments.folder(call.roots, env)
    record = os.path.join(path, environments.RECORD)
    if os.path.exists(record):
        os.unlink(record)
    shutil.rmtree(path, ignore_errors=True)
    call.frames.note(f"removed {env}", passing=True)
