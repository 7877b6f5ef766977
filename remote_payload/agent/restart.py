"""Stop and start in one round trip, under one lock, and no stop when the start could not follow."""

from __future__ import annotations

from agent import lock, start, stop
from agent.call import Args, Call, Json, Refusal

ARGS: Args = {**start.ARGS, **stop.ARGS}


def run(call: Call) -> Json:
    """`{"stop": …, "start": …}`; when the start fails, its error carries `stop`: nothing is left untold."""
    with lock.hold(call):
        plan = start.prepare(call)
        stopped = stop.stop(call)
        try:
            start.refuse_if_alive(call.roots)
            return {"stop": stopped, "start": start.launch(call, plan)}
        except Refusal as refusal:
            refusal.more["stop"] = stopped
            raise
