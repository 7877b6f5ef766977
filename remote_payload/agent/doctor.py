"""All that a run needs or that could slow it, looked at in one call: facts for `doctor`, no opinion.

Nothing is changed, but for what the kernel proof compiles into the cache that the run would use. No look
keeps another from being made: one that fails says so in its own place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

from agent import cache, files, gpu, gpu_health, interpreter, kernels, procs, releases, snapshot
from agent.call import Args, Call, Json, Refusal, Roots

ARGS: Args = {
    "recipe": (str, None, "a name under recipes/, or a YAML file of the container"),
    "overrides": (object, {}, "changes to the recipe: an object or a list of key=value"),
    "python": (str, None, "the run's interpreter; without it this one"),
    "gpu_deadline_s": (float, gpu.DEADLINE_S, "seconds for nvidia-smi, and beside it for the device files"),
    "prove": (bool, True, "run the kernel proof when there is a GPU and no run is alive"),
    "prove_s": (float, 300.0, "seconds that the kernel proof gets; it compiles when the cache is cold"),
}
CACHES_S = 2.0  # for counting their bytes: a cache of months has many thousand files
FX_THREADS = "trainer/fx_threads.py"


def run(call: Call) -> Json:
    """The facts of the contract's `doctor`."""
    roots, args = call.roots, call.args
    now = time.time()
    question = gpu_health.ask_long(roots.run, args["gpu_deadline_s"])
    paths = gpu_health.nodes()
    opening = gpu_health.ask_nodes(roots.run, args["gpu_deadline_s"], paths)
    release = releases.linked(roots, "current")
    release_dir = releases.folder(roots, release) if release else None
    with ThreadPoolExecutor(4) as pool:
        python = pool.submit(_python, args["python"])
        recipe = pool.submit(_recipe, args, release_dir)
        window = pool.submit(_tmux)
        gpus = gpu_health.answer_long(question)
        facts: Json = {
            "now": now,
            "hostname": os.uname().nodename,
            "uid": os.getuid(),
            "agent_python": {"path": sys.executable, "version": "{}.{}.{}".format(*sys.version_info)},
            "tmux": window.result(),
            "release": {"current": release, "patches_fx": _has(release_dir, FX_THREADS)},
            "disks": snapshot.disks(roots),
            "shm": snapshot.disk("/dev/shm"),
            "nodes": gpu_health.answer_nodes(opening, paths),
            "driver": {"kernel": gpu_health.kernel_driver(), "userland": gpu_health.userland()},
            "gpus": gpus,
            "python": python.result(),
            "recipe": recipe.result(),
        }
    facts.update(_processes(roots, gpus))
    facts["caches"] = _caches(roots, facts, release_dir)
    facts["kernels"] = _kernels(call, facts, release_dir)
    return facts


def _tried(look: Callable[[], Json]) -> Json:
    """What `look` found, or its refusal in the same place."""
    try:
        return {"error": None, "hint": "", **look()}
    except Refusal as refusal:
        return {"error": refusal.message, "hint": refusal.hint}
    except OSError as error:
        return {"error": f"{error.filename}: {error.strerror}" if error.filename else str(error), "hint": ""}


def _python(given: str | None) -> Json:
    def look() -> Json:
        path = interpreter.find_python(given)
        return {"path": path, **interpreter.about(path)}

    return _tried(look)


def _recipe(args: Json, release_dir: str | None) -> Json:
    """The recipe's own words, and how large its target model is."""

    def look() -> Json:
        if release_dir is None:
            raise Refusal("no-release", "there is no release to read it with", "invoke deploy")
        python = interpreter.find_python(args["python"])
        found = interpreter.describe_recipe(python, release_dir, args["recipe"] or "", args["overrides"])
        model = os.path.join(release_dir, str(found.get("model")))
        size = files.tree_bytes(model, CACHES_S)[0] if os.path.isdir(model) else None
        wanted = ("name", "checkpoint_bytes", "budget")
        closed = files.closed_to_us(model) if size is not None else None
        return {
            **{key: found.get(key) for key in wanted},
            "model": model,
            "model_bytes": size,
            "model_closed": closed,
        }

    return _tried(look)


def _tmux() -> Json:
    path = shutil.which("tmux")
    try:
        said = subprocess.run([path or "", "-V"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {"path": path, "version": None}
    words = said.stdout.decode("utf-8", "replace").split()
    return {"path": path, "version": words[-1] if words else None}


def _has(release_dir: str | None, path: str) -> bool:
    return release_dir is not None and os.path.isfile(os.path.join(release_dir, path))


def _processes(roots: Roots, gpus: Json) -> Json:
    """Runs of ours that are alive, and who else holds a GPU."""
    marked = procs.marked()
    ours = {proc.pid for found in marked.values() for proc in found}
    alive = []
    for folder in marked:
        if os.path.dirname(folder) == roots.runs:
            state = files.read_json(os.path.join(folder, "state.json")) or {}
            alive.append({"id": os.path.basename(folder), "kernels": state.get("kernels")})
    return {"alive": alive, "stale": [] if gpus["status"] == "absent" else gpu.holders(roots.run, ours)}


def _caches(roots: Roots, facts: Json, release_dir: str | None) -> Json:
    """`current`: the key of a run that started now; `whole` is false when there was no time to count."""
    current = None
    if release_dir is not None and facts["python"]["error"] is None:
        made = cache.make_key(facts["python"]["versions"], facts["gpus"], release_dir)
        current = made["key"]
    rows, ends = [], time.monotonic() + CACHES_S
    try:
        names = sorted(os.listdir(roots.cache))
    except OSError:
        names = []
    for name in names:
        path = os.path.join(roots.cache, name)
        size, whole = files.tree_bytes(path, max(0.0, ends - time.monotonic()))
        rows.append({"path": path, "key": name, "bytes": size, "whole": whole})
    return {"current": current, "rows": rows, "legacy": [each["path"] for each in cache.legacy(delete=False)]}


def _kernels(call: Call, facts: Json, release_dir: str | None) -> Json:
    """The proof (`{reports[], seconds}`), or `{error, hint}`, or why there is none: `{skipped}`."""
    if not call.args["prove"]:
        return {"skipped": "not asked for"}
    if facts["gpus"]["status"] == "absent":
        return {"skipped": "there is no GPU to prove them on"}
    if facts["alive"]:
        return {"skipped": f"{facts['alive'][0]['id']} is using the GPUs, and proved its own at its start"}
    if facts["gpus"]["status"] == "timeout":
        return {"skipped": "nvidia-smi does not answer, and the proof would hang as it does"}
    for part in ("python", "recipe"):
        if facts[part]["error"] is not None:
            return {"skipped": f"the {part} is not usable yet"}
    assert release_dir is not None
    call.frames.note("proving the kernels on the GPU (a minute or two when the cache is cold)")
    return _tried(lambda: _prove(call, facts, release_dir))


def _prove(call: Call, facts: Json, release_dir: str) -> Json:
    folder = os.path.join(call.roots.cache, facts["caches"]["current"])
    args, python = call.args, facts["python"]["path"]
    found = kernels.prove(python, release_dir, args["recipe"], args["overrides"], folder, args["prove_s"])
    return {"skipped": found["no_room"]} if "no_room" in found else found
