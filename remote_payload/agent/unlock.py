"""Break-glass: an operator's command that hangs must not keep a box from everybody until someone logs in.

Ends exactly the agent that holds the lock. Every change that an agent makes outlives its death half-way.
"""

from __future__ import annotations

import os
import signal
import time

from agent import lock, procs
from agent.call import Args, Call, Json, Refusal

ARGS: Args = {
    "pid": (int, None, "the holder that was seen; without it only a look"),
    "since": (float, None, "since when it held the lock then: a number may pass to another process"),
}
TERM_S, KILL_S = 2.0, 10.0  # SIGTERM ends an agent at once, unless it is stuck in the kernel


def run(call: Call) -> Json:
    """`{outcome: free|held|broken, owner, now}`; refuses with `locked` when it does not end."""
    owner = lock.owner(call.roots.run)
    facts: Json = {"owner": owner, "now": time.time()}
    if owner is None:
        return {"outcome": "free", **facts}
    if call.args["pid"] is None:
        return {"outcome": "held", **facts}
    if (owner.get("pid"), owner.get("since")) != (call.args["pid"], call.args["since"]):
        raise Refusal("usage", "somebody else holds the lock by now; nothing was done", "invoke unlock again")
    holder = _holder(call.roots.run, owner["pid"])
    began = time.monotonic()
    while lock.owner(call.roots.run) == owner:
        waited = time.monotonic() - began
        if waited > KILL_S:
            raise Refusal(
                "locked",
                f"process {owner['pid']} does not end",
                "the container must be restarted: pct reboot",
            )
        for number in (signal.SIGTERM, signal.SIGCONT) if waited < TERM_S else (signal.SIGKILL,):
            procs.send(holder, number)
        time.sleep(0.05)
    return {"outcome": "broken", **facts}


def _holder(run_root: str, pid: int) -> procs.Proc:
    """The process, when it has the lock's file open: what the file says was written before it could lie."""
    path = os.path.realpath(os.path.join(run_root, "lock"))
    found = procs.look(pid)
    try:
        holds = any(
            os.path.realpath(f"/proc/{pid}/fd/{each}") == path for each in os.listdir(f"/proc/{pid}/fd")
        )
    except OSError:
        holds = False
    if found is None or not holds:
        raise Refusal(
            "locked", f"the holder's process {pid} cannot be found", f"invoke exec 'fuser -v {path}'"
        )
    return found
