"""What became of every run, for people who compare: facts of many runs in one answer, no opinion on any."""

from __future__ import annotations

import os
import time
from typing import Any

from agent import metrics, procs, provenance, runs, shapes, snapshot
from agent.call import Args, Call, Json, Roots
from agent.files import read_json, tail_objects

ARGS: Args = {
    "runs": (list, [], "run ids, or `newest`; without them the newest"),
    "limit": (int, 20, "how many of the newest; 0: all"),
    "detail": (bool, False, "with curves over the whole run"),
    "points": (int, 64, "rows of those curves"),
    "without": (list, [], "ids@created whose provenance the other side has already"),
}
TAIL = 60  # metrics lines: what a rate looks back on
_KEPT = ("step", "loss", "tokens", "step_s", "compile", "tau")
_LEFT_OUT = ("env", "argv", "schema")  # of run.json: the environment may hold what nobody else should see


def run(call: Call) -> Json:
    """`{now, total, newest, runs[], missing[]}`; a run that is not here is missing, not an error."""
    args, marked = call.args, procs.marked()
    known = runs.known(call.roots, marked)
    newest = known[0] if known else None
    named = [newest or each if each == "newest" else each for each in args["runs"]]
    wanted = named or (known[: args["limit"]] if args["limit"] else known)
    here = [each for each in wanted if each in known]
    return {
        "now": time.time(),
        "total": len(known),
        "newest": newest,
        "runs": [entry(call.roots, each, marked, args) for each in here],
        "missing": [each for each in wanted if each not in known],
    }


def entry(roots: Roots, run_id: str, marked: dict[str, list[procs.Proc]], args: Json) -> Json:
    """One run, with the same names as in a snapshot, and `evaluations pin provenance? curves?`."""
    path = runs.folder(roots, run_id)

    def read(name: str, shape: Json) -> Any:
        return shapes.sound(read_json(os.path.join(path, name)), shape)

    record = read("run.json", shapes.RECORD)
    if record is not None:
        record = {key: value for key, value in record.items() if key not in _LEFT_OUT}
    state = read("state.json", shapes.STATE)
    lines = [shapes.sound(line, shapes.METRICS) for line in tail_objects(metrics.path(path), TAIL)]
    facts: Json = {
        "id": run_id,
        "record": record,
        "state": state,
        "exit": read("exit.json", shapes.EXIT),
        "stop": read("stop.json", shapes.STOP),
        "attempts": read("attempts.json", shapes.ATTEMPTS),
        "pin": read_json(os.path.join(path, runs.PIN)),
        "metrics": [
            {key: line[key] for key in _KEPT if key in line} for line in lines if line.get("step") is not None
        ],
        "evaluations": metrics.evaluations(path),
        "checkpoints": [{"step": each.step, "at": each.at} for each in runs.checkpoints(path)],
        "export": os.path.isdir(os.path.join(path, "export")),
        "processes": snapshot.processes(marked.get(path, []), state),
    }
    if f"{run_id}@{(record or {}).get('created')}" not in args["without"]:
        facts["provenance"] = provenance.read(path)
    if args["detail"]:
        facts["curves"] = metrics.curves(path, args["points"])
    return facts
