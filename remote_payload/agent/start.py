"""A run begins only when all it needs is there, and the operator hears at once whether it lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Any, NamedTuple

from agent import (
    cache,
    gpu,
    interpreter,
    kernels,
    lock,
    notifying,
    procs,
    provenance,
    releases,
    runs,
    secrets,
    shapes,
    tmux,
    unpack,
)
from agent.call import Args, Call, Json, Refusal, Roots
from agent.files import closed_to_us, number, read_json, size_words, tail_lines, write_json

ARGS: Args = {
    "recipe": (str, None, "a name under recipes/, or a YAML file of the container"),
    "overrides": (object, {}, "changes to the recipe: an object or a list of key=value"),
    "python": (str, None, "the run's interpreter; without it this one"),
    "fresh_cache": (bool, False, "start with an empty compile cache"),
    "resume": (str, "auto", "auto, none or a run id"),
    "release": (str, None, "release, or the beginning of its name; without it the current one"),
    "like": (
        str,
        None,
        "a run to repeat, or `newest`: its recipe, overrides, release, restarts; `auto` resumes it",
    ),
    **kernels.ALLOW,
    "grace_s": (float, None, "seconds that a later stop gives the trainer; without it 120"),
    "auto_restart": (int, None, "how often a crash is tried again (attempts.py); without it as `like`, or 0"),
    "backoff_s": (float, None, "seconds until the first time, twice as many until the next; without it 15"),
    "first_state_s": (float, 180.0, "seconds to wait for the first state"),
}
SPAWN_S = 10.0  # seconds in which the supervisor must have appeared
NOTE_S = 2.0
DEATH_LINES = 20


class Plan(NamedTuple):
    """A start that was found possible, before anything is changed."""

    release: str
    release_dir: str
    python: str
    recipe: Json  # what `trainer.describe` says of it
    name: str
    overrides: Any
    resume: str
    auto_restart: Json


def run(call: Call) -> Json:
    with lock.hold(call):
        plan = prepare(call)
        refuse_if_alive(call.roots)
        return launch(call, plan)


def prepare(call: Call) -> Plan:
    """Look for all that a run needs; one refusal for the first thing missing. Changes nothing but caches."""
    roots, args = call.roots, _wishes(call)
    name, overrides = args["recipe"], args["overrides"]
    if not releases.names(roots):
        raise Refusal("no-release", f"no release in {roots.opt}", "invoke deploy")
    release = releases.named(roots, args["release"] or "current")
    release_dir = releases.folder(roots, release)
    edited = unpack.differences(release_dir, releases.manifest(release_dir))
    if edited:
        raise Refusal(
            "verify",
            f"release {release} was changed by hand: {edited[0]}",
            "invoke deploy, or name another with --release: what runs must be what its name says",
        )
    python = interpreter.find_python(args["python"])
    secrets.check(call, taken=_environment(python, "", "", ""))
    notifying.check(call, python)
    _find_recipe(release_dir, name)
    recipe = interpreter.describe_recipe(python, release_dir, name, overrides)
    model = str(recipe.get("model"))
    if not os.path.isdir(os.path.join(release_dir, model)):
        raise Refusal(
            "no-model",
            f"the model folder {model} is not in the container",
            "put the target model there, or name another: --set target.model=FOLDER",
        )
    closed = closed_to_us(os.path.join(release_dir, model))
    if closed:
        raise Refusal(
            "no-model",
            f"root of the container may not read {closed}",
            "chmod -R a+rX the model's folder on the host: an unprivileged container's root is nobody there",
        )
    asked = recipe.get("values", {}).get("data", {})  # a release from before it was told says nothing
    for key in ("train", "heldout"):
        if asked.get(key) and not os.path.exists(os.path.join(release_dir, asked[key])):
            raise Refusal(
                "no-data",
                f"data.{key} {asked[key]} is not in the container",
                f"make it there with trainer.prepare, or name another: --set data.{key}=FILE",
            )
    os.makedirs(roots.runs, exist_ok=True)
    room = os.statvfs(roots.runs)
    free, needed = room.f_bavail * room.f_frsize, 2 * int(recipe.get("checkpoint_bytes") or 0)
    if free < needed:
        raise Refusal(
            "disk",
            f"{roots.runs} has {size_words(free)} free, two checkpoints need {size_words(needed)}",
            "remove old checkpoints, or give the container more disk",
        )
    point = _to_go_on_from(roots, args["resume"], recipe)
    if point is not None:
        words = f"asking whether {point['run']} can be gone on from at step {point['step']}"
        call.frames.note(words, passing=True)
        interpreter.refuse_another_training(python, release_dir, name, overrides, point["path"])
    kernels.check(call, python, release_dir, name, overrides, recipe)
    again = {"limit": args["auto_restart"] or 0, "backoff_s": args["backoff_s"]}
    return Plan(release, release_dir, python, recipe, name, overrides, args["resume"], again)


def _wishes(call: Call) -> Json:
    """The arguments, completed from the run that is to be repeated."""
    args = call.args
    if args["like"] is None:
        return args
    like = runs.named(call.roots, None if args["like"] == "newest" else args["like"])
    record = read_json(os.path.join(runs.folder(call.roots, like), "run.json"))
    if record is None:
        raise Refusal("usage", f"run {like} has no run.json that can be read", "name a recipe instead")
    theirs, ours = record.get("overrides") or {}, args["overrides"]
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        raise Refusal("usage", f"the overrides of {like} cannot be merged with others", "give all of them")
    release = args["release"] or record.get("release")
    if not args["release"] and not os.path.isdir(releases.folder(call.roots, str(release))):
        commit = (provenance.read(runs.folder(call.roots, like)) or {}).get("source") or {}
        made = f"deploy commit {commit['commit'][:12]} again, or " if commit.get("commit") else ""
        raise Refusal(
            "no-release", f"release {release} of {like} is no longer here", f"{made}--release current"
        )
    return {
        **args,
        "like": like,
        "recipe": args["recipe"] or record.get("recipe"),
        "overrides": {**theirs, **ours},
        "release": release,
        "resume": like if args["resume"] == "auto" else args["resume"],
        **_restarts(args, record),
    }


def _restarts(args: Json, record: Json) -> Json:
    """What is to happen after a crash, where that was not said: what happens to the run that is repeated."""
    theirs = shapes.sound(record.get("auto_restart"), shapes.AGAIN) or {}
    if args["auto_restart"] is not None or not theirs.get("limit"):
        return {}
    backoff_s = theirs.get("backoff_s") if args["backoff_s"] is None else args["backoff_s"]
    return {"auto_restart": int(theirs["limit"]), "backoff_s": backoff_s}


def _to_go_on_from(roots: Roots, resume: str, recipe: Json) -> Json | None:
    """The checkpoint that this run goes on from, or one that its training has written before that: asked
    before the run that is alive is stopped for it. None without one, or when the stop writes the first."""
    config_hash = str(recipe.get("config_hash"))
    run = runs.newest_alike(roots, config_hash) if resume == "auto" else resume
    if run is None or run == "none":
        return None
    alive = bool(procs.scope(runs.require(roots, run)))
    if resume != "auto":
        _refuse_too_few_steps(roots, run, alive, number(recipe, "steps"))
    if alive and runs.resume_point(roots, run) is None:
        return None
    return runs.choose_resume(roots, resume, config_hash)


def _refuse_too_few_steps(roots: Roots, run: str, alive: bool, steps: float | None) -> None:
    """What was told to be gone on with has more steps, or has them by the time it is stopped; or it has them
    all, and its export."""
    point = runs.resume_point(roots, run)
    state = read_json(os.path.join(runs.folder(roots, run), "state.json")) or {}
    done = float(point["step"]) if point is not None else 0.0
    if alive:
        done = max(done, number(state, "step") or 0.0)
    if steps is None or done < steps:
        return
    says = f"{run} stands at step {int(done)}, and train.steps is {int(steps)}"
    if done == steps:
        if alive or state.get("phase") != "finished":
            return
        says = f"{run} has finished its {int(steps)} steps"
    raise Refusal("usage", says, f"--set train.steps={2 * int(done)} trains on, --from-scratch begins anew")


def _find_recipe(release_dir: str, name: str | None) -> None:
    folder = os.path.join(release_dir, "recipes")
    if name is not None:
        is_file = name.endswith((".yaml", ".yml"))
        path = os.path.join(release_dir, name) if is_file else os.path.join(folder, name + ".yaml")
        if os.path.isfile(path):
            return
    names = os.listdir(folder) if os.path.isdir(folder) else []
    known = ", ".join(sorted(each[:-5] for each in names if each.endswith(".yaml"))) or "none"
    raise Refusal("no-recipe", f"there is no recipe {name!r} in the release", f"there are: {known}")


def refuse_if_alive(roots: Roots) -> None:
    for run_dir, found in procs.marked().items():
        if os.path.dirname(run_dir) != roots.runs:
            continue
        run_id = os.path.basename(run_dir)
        if os.path.exists(os.path.join(run_dir, "exit.json")):
            words = f"run {run_id} has ended, but its process {found[0].pid} is left ({found[0].command:.60})"
        else:
            words = f"run {run_id} is alive"
        raise Refusal("run-alive", words, "invoke restart, or invoke abort", run=run_id)


def launch(call: Call, plan: Plan) -> Json:
    """Make the run and start it; returns with its first state, or refuses with `died` and its last lines."""
    roots, args = call.roots, call.args
    config_hash = str(plan.recipe.get("config_hash"))
    resume_from = runs.choose_resume(roots, plan.resume, config_hash)
    versions = interpreter.versions(plan.python)
    gpus = gpu.query(roots.run)
    made = cache.make_key(versions, gpus, plan.release_dir)
    chosen = cache.choose(roots, made, args["fresh_cache"], call.nonce)
    run_id, run_dir = runs.create(roots)
    record = {
        "schema": 1,
        "id": run_id,
        "created": time.time(),
        "release": plan.release,
        "release_dir": plan.release_dir,
        "recipe": plan.name,
        "overrides": plan.overrides,
        "python": plan.python,
        "argv": [plan.python, "-m", "trainer", "--run-dir", run_dir],
        "env": _environment(plan.python, run_id, run_dir, chosen["dir"]),
        "secrets": sorted(secrets.environment(call.private)),  # their names
        "notify": notifying.record(call),
        "cache": chosen,
        "resume_from": resume_from,
        "allow_slow_kernels": args["allow_slow_kernels"],
        "auto_restart": plan.auto_restart,
        "operator": call.operator,
        "grace_s": runs.DEFAULT_GRACE_S if args["grace_s"] is None else args["grace_s"],
        "config_hash": plan.recipe.get("config_hash"),
        "versions": versions,
        "gpus": provenance.gpu_facts(gpus),
    }
    try:
        provenance.record(run_dir, plan.release_dir, plan.python, plan.recipe, gpus)
        notifying.place(run_dir, call)
        write_json(os.path.join(run_dir, "run.json"), record)
    except (OSError, Refusal):
        shutil.rmtree(run_dir, ignore_errors=True)  # a full disk: no run without a record
        raise
    if plan.resume != "none":
        lines = runs.passed_over(roots, resume_from, config_hash)
        if call.args["like"] is None:  # else the person has said which one
            lines += runs.left_behind(roots, run_id, config_hash)
        for line in lines:
            call.frames.note(line)
    where = f"from step {resume_from['step']} of {resume_from['run']}" if resume_from else "from scratch"
    call.frames.note(f"{run_id}: release {plan.release}, {where}, {chosen['choice']} cache")
    began = time.monotonic()
    _spawn(call, record, run_dir)
    phase = _await_first_state(call, run_id, run_dir, began)
    cache.drop_old(roots)
    return {
        "run": run_id,
        "resume_from": resume_from,
        "cache": {**chosen, "legacy": cache.legacy(delete=args["fresh_cache"])},
        "phase": phase,
        "record": {key: value for key, value in record.items() if key not in ("env", "argv")},
        "provenance": provenance.read(run_dir),
        "first_state_after_s": None if phase is None else round(time.monotonic() - began, 3),
    }


def _environment(python: str, run_id: str, run_dir: str, cache_dir: str) -> dict[str, str]:
    """All that the trainer's process sees: nothing of the operator's shell or of the host leaks in."""
    path = os.environ.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return {
        procs.RUN_ID: run_id,
        procs.RUN_DIR: run_dir,
        "PATH": f"{os.path.dirname(python)}:{path}",  # ptxas, ninja and the like of a venv
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **cache.environment(cache_dir),
    }


def _spawn(call: Call, record: Json, run_dir: str) -> None:
    """Start the supervisor in its tmux session; without tmux it runs all the same, only without a window."""
    marks = [
        f"{name}={record['env'][name]}" for name in (procs.RUN_ID, procs.RUN_DIR, "PATH", "HOME", "LANG")
    ]
    # `env -i`: the marker must be in the supervisor's environment, and must not be in the tmux server's
    argv = ["/usr/bin/env", "-i", *marks, record["python"], "-m", "agent.supervise", run_dir]
    if call.private:
        argv.append(secrets.offer(notifying.handover(call)))
    complaint = tmux.new_session(call.roots.run, record["id"], record["release_dir"], argv)
    if not complaint:
        return
    call.frames.note(f"{complaint}: the run starts without a session to attach to")
    subprocess.Popen(
        argv,
        cwd=record["release_dir"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _await_first_state(call: Call, run_id: str, run_dir: str, began: float) -> str | None:
    """The phase of the first state; None when it lives but has written none in `first_state_s`."""
    seen, told = False, began
    while True:
        state = read_json(os.path.join(run_dir, "state.json"))
        alive = bool(
            procs.scope(run_dir)
        )  # before exit.json is read: it is written before the supervisor leaves
        ended = read_json(os.path.join(run_dir, "exit.json"))
        now = time.monotonic()
        if ended is not None and ended.get("reason") == "crashed":
            raise _died(run_id, run_dir, str(ended.get("detail")))
        if state is not None:
            return str(state.get("phase"))
        if not alive and (seen or now - began > SPAWN_S):
            words = "its processes are gone" if seen else "its supervisor did not start"
            raise _died(run_id, run_dir, words)
        if now - began > call.args["first_state_s"]:
            call.frames.note(f"{run_id} lives, but has written no state in {call.args['first_state_s']:g} s")
            return None
        if now - told >= NOTE_S:
            told = now
            call.frames.note(f"{run_id}: waiting for its first state, {int(now - began)} s", passing=True)
        seen = seen or alive
        time.sleep(0.05)


def _died(run_id: str, run_dir: str, detail: str) -> Refusal:
    log: list[str] = tail_lines(os.path.join(run_dir, "train.log"), DEATH_LINES)
    more: dict[str, Any] = {"run": run_id, "log": log}
    return Refusal(
        "died", f"run {run_id} died before its first state: {detail}", "its last lines say why", **more
    )
