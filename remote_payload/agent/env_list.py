"""What environments there are, what is in each, who uses it: facts for `env.list` and `env.diff`."""

from __future__ import annotations

from agent import environments, lock
from agent.call import Args, Call, Json

ARGS: Args = {"only": (list, None, "names, ids or links, each refused when there is none; without it all")}


def run(call: Call) -> Json:
    """`{environments[], half_built[], current, previous, users{id: why}, building}`; records as they are."""
    roots, only = call.roots, call.args["only"]
    records = [environments.named(roots, str(each)) for each in only or []]
    return {
        "environments": environments.whole(roots) if only is None else records,
        "half_built": environments.half_built(roots),
        "current": environments.linked(roots, "current"),
        "previous": environments.linked(roots, "previous"),
        "users": environments.users(roots),
        "building": lock.owner(roots.run, environments.LOCK),
    }
