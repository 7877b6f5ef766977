"""Back to a release that worked: it is here already, so one link moves, after its files were proven."""

from __future__ import annotations

import os

from agent import deploy, lock, procs, releases, unpack
from agent.call import Args, Call, Json, Refusal

ARGS: Args = {"release": (str, None, "release, or the beginning of its name; without it the previous one")}


def run(call: Call) -> Json:
    """`{outcome, release, previous, alive}`: `switched`, or `unchanged` when it is current already.

    `alive`: the run that goes on with the release it was started from.
    """
    with lock.hold(call):
        current = releases.linked(call.roots, "current")
        chosen = releases.named(call.roots, call.args["release"] or "previous")
        living = [
            os.path.basename(path) for path in procs.marked() if os.path.dirname(path) == call.roots.runs
        ]
        answer = {"release": chosen, "previous": current, "alive": living[0] if living else None}
        if chosen == current:
            return {**answer, "outcome": "unchanged"}
        place = releases.folder(call.roots, chosen)
        edited = unpack.differences(place, releases.manifest(place))
        if edited:
            words = f"release {chosen} was changed by hand: {edited[0]}"
            raise Refusal("verify", words, "deploy it again from its commit, or choose another release")
        deploy.switch(call.roots, chosen, current)
        return {**answer, "outcome": "switched"}
