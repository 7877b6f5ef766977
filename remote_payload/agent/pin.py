"""A run that was named to be kept stays, whatever is pruned; the name of who wanted it stays with it."""

from __future__ import annotations

import os
import time

from agent import runs
from agent.call import Args, Call, Json
from agent.files import remove_quietly, write_json

ARGS: Args = {
    "run": (str, None, "run id; without it the newest"),
    "off": (bool, False, "take the pin away"),
    "reason": (str, "", "why, for whoever meets it"),
}


def run(call: Call) -> Json:
    """`{run, pinned, changed}`."""
    run_id = runs.named(call.roots, call.args["run"])
    path = os.path.join(runs.folder(call.roots, run_id), runs.PIN)
    was, wanted = os.path.exists(path), not call.args["off"]
    if wanted:
        reason = call.args["reason"] or None
        write_json(path, {"at": time.time(), "operator": call.operator, "reason": reason})
    else:
        remove_quietly(path)
    return {"run": run_id, "pinned": wanted, "changed": was != wanted}
