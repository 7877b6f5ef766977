"""SIGKILL does not say who sent it: the control group counts whom the kernel ended for want of memory."""

from __future__ import annotations

import os
import time

from agent import procs

ROOT = "/sys/fs/cgroup"
LOOK_BACK_S = 60.0  # freeing a large process may take seconds; an older kill was another process's


class Watch:
    """Tells at a trainer's end whether the kernel killed for want of memory just before."""

    def __init__(self) -> None:
        self.older = self.newer = kills()
        self.at = time.monotonic()

    def note(self) -> None:
        """To be called now and then while the trainer lives."""
        if time.monotonic() - self.at >= LOOK_BACK_S:
            self.older, self.newer, self.at = self.newer, kills(), time.monotonic()

    def killed(self) -> bool:
        """Whether one of this control group was killed in the last one or two minutes."""
        now = kills()
        return now is not None and self.older is not None and now > self.older


def kills() -> int | None:
    """Processes of our control group that the kernel has ended for want of memory, those that the whole
    machine lacked included; None where nothing tells."""
    for place in _places():
        try:
            with open(place, encoding="ascii") as file:
                for line in file:
                    name, _, count = line.partition(" ")
                    if name == "oom_kill":
                        return int(count)
        except (OSError, ValueError):
            continue
    return None


def _places() -> list[str]:
    """Version 1 has a tree for memory alone. Inside a container the group's path may be the host's, or its
    root the container's own."""
    places = []
    for line in procs.read_proc(os.getpid(), "cgroup").decode("utf-8", "replace").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            places += [f"{ROOT}/memory{path}/memory.oom_control", f"{ROOT}/memory/memory.oom_control"]
        elif number == "0":
            places += [f"{ROOT}{path}/memory.events", f"{ROOT}/memory.events"]
    return places
