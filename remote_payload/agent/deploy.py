"""A release arrives whole or not at all: unpacked beside the others, proven, then one link moves."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

from agent import gpu, kernels, lock, procs, provenance, releases, runs, unpack
from agent.call import Args, Call, Json, Refusal, Roots
from agent.files import read_json, size_words, write_json
from agent.interpreter import ImportCheck, describe_recipe, find_python

ARGS: Args = {
    "release": (str, None, "the release's content hash"),
    "manifest": (list, None, "its files: [{path, sha256, bytes, mode}]"),
    "python": (str, None, "the run's interpreter; without it this one"),
    "stream": (bool, False, "we say in a part which files we want, and a tar of them follows on stdin"),
    "recipe": (str, None, "the recipe whose target's kernels are to be proven on a GPU"),
    "overrides": (object, {}, "changes to that recipe"),
    **kernels.ALLOW,
    "source": (dict, None, "where it comes from: {commit, dirty}"),
}
KEEP = 5  # releases, besides the current one and those of live and pinned runs
KEEP_EDITED = 2  # set-aside copies of releases that were edited by hand
_INCOMING = ".incoming-"
_EDITED = ".edited-"


def run(call: Call) -> dict[str, Any]:
    """The contract's `deploy`. `files` and `bytes` count what travelled; `edited`: files changed by hand."""
    if call.args["release"] is None or not call.args["manifest"]:
        raise Refusal("usage", "deploy needs a release and its manifest")
    release = releases.check_name(call.args["release"])
    manifest = unpack.check_manifest(call.args["manifest"])
    python = find_python(call.args["python"])
    with lock.hold(call):
        os.makedirs(call.roots.releases, exist_ok=True)
        _remove_debris(call.roots)
        place = releases.folder(call.roots, release)
        previous = releases.linked(call.roots, "current")
        edited = unpack.differences(place, manifest) if os.path.isdir(place) else []
        answer: Json = {"release": release, "previous": previous, "files": 0, "bytes": 0, "edited": edited}
        if os.path.isdir(place) and not edited:
            provenance.note_source(place, call.args["source"])
            if previous == release:
                return {**answer, "outcome": "unchanged"}
            switch(call.roots, release, previous)
            return {**answer, "outcome": "switched", "pruned": _prune(call.roots)}
        if edited:
            shown = ", ".join(edited[:5]) + (f" and {len(edited) - 5} more" if len(edited) > 5 else "")
            call.frames.note(f"release {release} is no longer what was deployed ({shown}): it is made again")
        return {**answer, **_make(call, release, manifest, python, previous)}


def _make(call: Call, release: str, manifest: list[Json], python: str, previous: str | None) -> Json:
    """Build the release in a folder of its own and move it into place; a failure leaves nothing of it."""
    roots = call.roots
    _check_room(roots, manifest)
    sources = unpack.find_copies(roots, manifest)
    want = [file for file in manifest if file["path"] not in sources]
    if want:
        wanted = [file["path"] for file in want]
        if not call.args["stream"]:
            return {"outcome": "missing", "want": wanted}
        call.frames.part({"want": wanted})
    incoming = os.path.join(roots.releases, _INCOMING + call.nonce)
    try:
        os.mkdir(incoming, 0o755)
        with ImportCheck(python, incoming) as check:
            files, size = unpack.receive(call.stdin, incoming, manifest) if want else (0, 0)
            unpack.copy_rest(incoming, manifest, sources)
            record = {
                "schema": 1,
                "release": release,
                "created": time.time(),
                "operator": call.operator,
                "source": call.args["source"],
                "files": manifest,
            }
            write_json(os.path.join(incoming, releases.MANIFEST), record)
            verified = unpack.stamps(incoming, manifest)
            call.frames.note(f"{len(manifest)} files verified; checking that {python} can import them")
            versions = check.answer()
        proven = _prove_kernels(call, python, incoming)
        wrong = unpack.differences(incoming, manifest, verified)
        if wrong:
            raise Refusal("verify", f"{wrong[0]} changed while the release was checked", "deploy again")
        unpack.sync_tree(incoming)
        place = releases.folder(roots, release)
        if os.path.isdir(place):  # edited by hand: set aside, for whoever edited it
            os.rename(place, os.path.join(roots.releases, f"{_EDITED}{release}-{call.nonce}"))
        os.rename(incoming, place)
        unpack.sync_folder(roots.releases)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    switch(roots, release, previous)
    return {
        "outcome": "deployed",
        "files": files,
        "bytes": size,
        "versions": versions,
        "kernels": proven,
        "pruned": _prune(roots),
    }


def _prove_kernels(call: Call, python: str, release_dir: str) -> list[str]:
    """kernels.check, where there is a GPU; what is wrong with the recipe itself is for the start to say."""
    recipe, overrides = call.args["recipe"], call.args["overrides"]
    if recipe is None or gpu.query(call.roots.run)["status"] == "absent":
        return []
    try:
        described = describe_recipe(python, release_dir, recipe, overrides)
    except Refusal:
        return []
    return kernels.check(call, python, release_dir, recipe, overrides, described)


def switch(roots: Roots, release: str, previous: str | None) -> None:
    """Move `current`, and keep where it was as `previous`; each link is replaced in one step."""
    os.utime(releases.folder(roots, release))  # the newest are kept
    for link, target in (("previous", previous), ("current", release)):
        if (
            target is None
            or releases.linked(roots, link) == target
            or (link == "previous" and target == release)
        ):
            continue
        temporary = os.path.join(roots.opt, f".{link}-{os.getpid()}")
        if os.path.lexists(temporary):
            os.unlink(temporary)
        os.symlink(os.path.join("releases", target), temporary)
        os.replace(temporary, os.path.join(roots.opt, link))
    unpack.sync_folder(roots.opt)


def _check_room(roots: Roots, manifest: list[Json]) -> None:
    room = os.statvfs(roots.releases)
    files = 2 * len(manifest)  # byte code, and a folder now and then
    if room.f_files and room.f_favail < files:  # 0 of 0: they are not counted (btrfs)
        raise Refusal(
            "disk",
            f"{roots.releases} has {room.f_favail} inodes free, this release needs {files}",
            "remove small files from that disk, many of them",
        )
    size = sum(file["bytes"] for file in manifest)
    free, needed = room.f_bavail * room.f_frsize, int(size * 1.2)  # byte code and block rounding
    if free < needed:
        raise Refusal(
            "disk",
            f"{roots.releases} has {size_words(free)} free, this release needs {size_words(needed)}",
            "remove what fills that disk",
        )


def _remove_debris(roots: Roots) -> None:
    """Half-made releases of broken deploys. We hold the lock, so none of them is in the making."""
    for name in os.listdir(roots.releases):
        if name.startswith(_INCOMING):
            shutil.rmtree(os.path.join(roots.releases, name), ignore_errors=True)
    for name in os.listdir(roots.opt):
        if name.startswith((".current-", ".previous-")):
            os.unlink(os.path.join(roots.opt, name))


def _prune(roots: Roots) -> list[str]:
    """Remove releases beyond the newest few; never the current one, nor one of a live or pinned run."""
    keep = set(releases.names(roots)[:KEEP]) | {releases.linked(roots, "current")}
    for run_dir in (*procs.marked(), *runs.pinned(roots)):
        record = read_json(os.path.join(run_dir, "run.json")) or {}
        keep.add(record.get("release"))
    gone = [name for name in releases.names(roots) if name not in keep]
    edited = [name for name in os.listdir(roots.releases) if name.startswith(_EDITED)]
    edited.sort(key=lambda name: os.lstat(os.path.join(roots.releases, name)).st_ctime, reverse=True)
    for name in gone + edited[KEEP_EDITED:]:
        # renamed first: a removal that is cut short leaves debris, never a release with holes
        doomed = os.path.join(roots.releases, f"{_INCOMING}old-{name.lstrip('.')}")
        os.rename(os.path.join(roots.releases, name), doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return gone
