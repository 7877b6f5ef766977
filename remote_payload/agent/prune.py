"""Old runs fill the disk: those may go that do not live, are not pinned, and that no kept run resumes."""

from __future__ import annotations

import os
import shutil

from agent import lock, procs, runs
from agent.call import Args, Call, Json, Refusal, Roots
from agent.files import read_json, tree_bytes

ARGS: Args = {
    "keep": (int, None, "how many of the newest stay"),
    "runs": (list, [], "remove exactly these, of those that `keep` allows; without them only look"),
}
_DEBRIS = ".pruned-"


def run(call: Call) -> Json:
    """`{doomed[], kept{id: why}, freed_bytes, removed[]}`: what may go, or with `runs` what went."""
    args = call.args
    if not args["keep"]:
        raise Refusal(
            "usage", "prune must be told how many runs stay, 1 or more", "invoke runs.prune --keep 10"
        )
    with lock.hold(call):
        _remove_debris(call.roots)
        kept = keepers(call.roots, args["keep"])
        doomed = [each for each in runs.ids(call.roots) if each not in kept]
        changed = [each for each in args["runs"] if each not in doomed]
        if changed:
            why = kept.get(changed[0], "gone")
            raise Refusal("usage", f"{changed[0]} is not to be removed any more: {why}", "look again")
        chosen = args["runs"] or doomed
        listed = [_listed(call.roots, each) for each in chosen]
        for each in args["runs"]:
            _remove(call, each)
    return {
        "doomed": listed,
        "kept": kept,
        "freed_bytes": sum(each["bytes"] for each in listed),
        "removed": list(args["runs"]),
    }


def keepers(roots: Roots, keep: int) -> dict[str, str]:
    """The runs that stay and why: the newest, the living, the pinned, and those that one of these resumes."""
    marked, pinned = procs.marked(), runs.pinned(roots)
    kept: dict[str, str] = {}
    for place, run_id in enumerate(runs.ids(roots)):
        path = runs.folder(roots, run_id)
        if path in marked:
            kept[run_id] = "alive"
        elif path in pinned:
            kept[run_id] = "pinned"
        elif place < keep:
            kept[run_id] = f"one of the newest {keep}"
    for run_id in list(kept):
        point = runs.resume_point(roots, run_id)
        if point is not None and point["run"] not in kept:
            kept[str(point["run"])] = f"{run_id} resumes at its checkpoint"
    return kept


def _listed(roots: Roots, run_id: str) -> Json:
    path = runs.folder(roots, run_id)
    record = read_json(os.path.join(path, "run.json")) or {}
    whole = runs.checkpoints(path)
    return {
        "id": run_id,
        "recipe": record.get("recipe"),
        "created": record.get("created"),
        "last_checkpoint": whole[-1].step if whole else None,
        "export": os.path.isdir(os.path.join(path, "export")),
        "bytes": tree_bytes(path)[0],
    }


def _remove(call: Call, run_id: str) -> None:
    """Renamed first: a removal that is cut short leaves debris, never a run with holes."""
    path = runs.folder(call.roots, run_id)
    doomed = os.path.join(call.roots.runs, f"{_DEBRIS}{run_id}-{call.nonce}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    call.frames.note(f"removed {run_id}", passing=True)


def _remove_debris(roots: Roots) -> None:
    try:
        names = os.listdir(roots.runs)
    except OSError:
        return
    for name in names:
        if name.startswith(_DEBRIS):
            shutil.rmtree(os.path.join(roots.runs, name), ignore_errors=True)
