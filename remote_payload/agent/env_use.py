"""Another environment becomes the current one for runs to come; a run that is alive keeps its own."""

from __future__ import annotations

from agent import env_build, environments
from agent.call import Args, Call, Json, Refusal

ARGS: Args = {"env": (str, None, "name, beginning of an id, or `previous`")}


def run(call: Call) -> Json:
    """`{outcome, id, name, previous}`; outcome is `switched`, or `unchanged` when it is current already."""
    if not call.args["env"]:
        raise Refusal("usage", "env-use needs a name", "invoke env.list")
    chosen = environments.named(call.roots, call.args["env"])
    before = environments.linked(call.roots, "current")
    answer = {"id": chosen["id"], "name": chosen.get("name"), "previous": before}
    if chosen["id"] == before:
        return {**answer, "outcome": "unchanged"}
    env_build.use(call, chosen["id"])
    return {**answer, "outcome": "switched"}
