"""Looks over one long `pct exec`: parts become a snapshot, that a verdict, and the last one is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from controller import history
from controller.call import call
from controller.deadline import DEFAULT, Deadline
from controller.inventory import Box
from controller.verdict import Verdict, judge
from controller.watch_state import Seen

Json = dict[str, Any]


class Looks:
    """What was seen of a box's run, over as many connections as that takes, and the verdict on it."""

    def __init__(self, box: Box) -> None:
        self.box, self.seen = box, Seen()
        self.verdict = Verdict("unreachable", "not looked yet")
        self._remembered = 0

    def follow(self, args: Json, on_part: Callable[[Json], None], *, deadline: Deadline = DEFAULT) -> Json:
        """One connection, until the run has ended or `on_part`, which may `take` the part, raises.

        Raises what `call` raises. However it ends, a later `status` of a box that is gone knows what was seen
        last, and how long ago.
        """
        try:
            return call(self.box, "watch", args, on_part=on_part, deadline=deadline)
        finally:
            run = (self.seen.snapshot or {}).get("run")
            if run and self.seen.looks > self._remembered:
                self._remembered = self.seen.looks
                history.remember(self.box, run, self.verdict.word)

    def take(self, part: Json) -> Verdict:
        """One `part` of the agent's watch."""
        box = self.box
        self.seen.take(part)
        self.verdict = judge(self.seen.snapshot, gpus=box.gpus, vmid=box.vmid, own=box.own)
        return self.verdict
