"""Lines of a log carry no time, and `logs --since` needs one: where it ended, noted every few seconds."""

from __future__ import annotations

import os
import time

NAME = "log.times"
EVERY_S = 5.0
GROWTH_S = 300.0  # how far `growth` looks back
_TIMES_TAIL = 4096  # bytes of the notes: more than five minutes
_LINE_LIMIT = 64 * 1024  # bytes looked through for the beginning of a line


class Writer:
    """Adds `epoch offset` to the run's `log.times` when the log has grown; a full disk costs only that."""

    def __init__(self, run_dir: str) -> None:
        self.log, self.times = os.path.join(run_dir, "train.log"), os.path.join(run_dir, NAME)
        self.size, self.at = -1, -EVERY_S

    def due(self) -> bool:
        return time.monotonic() - self.at >= EVERY_S

    def note(self) -> None:
        self.at = time.monotonic()
        try:
            size = os.stat(self.log).st_size
            if size != self.size:
                with open(self.times, "a", encoding="ascii") as file:
                    file.write(f"{time.time():.1f} {size}\n")
                self.size = size
        except OSError:
            pass


def growth(run_dir: str, now: float) -> dict[str, float] | None:
    """`{bytes, seconds}`: what the log grew by over the last five minutes; None where too little is noted."""
    try:
        with open(os.path.join(run_dir, NAME), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TIMES_TAIL))
            lines = file.read(_TIMES_TAIL).decode("ascii", "replace").split("\n")
    except OSError:
        return None
    noted: list[tuple[float, int]] = []
    for line in lines[:-1]:  # the last is empty, or being written
        at, _, size = line.partition(" ")
        try:
            noted.append((float(at), int(size)))
        except ValueError:
            continue
    recent = [each for each in noted if now - each[0] <= GROWTH_S]
    if len(recent) < 2:
        return None
    return {"bytes": recent[-1][1] - recent[0][1], "seconds": now - recent[0][0]}


def offset(run_dir: str, since: float) -> int | None:
    """The beginning of the line that was being written at `since` (epoch seconds), or a few seconds before.

    None when nothing was noted: an older run. A log that was cut since then is read from its beginning.
    """
    found = _noted(run_dir, since)
    if found is None:
        return None
    try:
        with open(os.path.join(run_dir, "train.log"), "rb") as file:
            if found > file.seek(0, os.SEEK_END):
                return 0
            begin = max(0, found - _LINE_LIMIT)
            file.seek(begin)
            return begin + file.read(found - begin).rfind(b"\n") + 1
    except OSError:
        return 0


def _noted(run_dir: str, since: float) -> int | None:
    before = None
    try:
        with open(os.path.join(run_dir, NAME), encoding="ascii", errors="replace") as file:
            for line in file:
                at, _, size = line.partition(" ")
                try:
                    if float(at) > since:
                        return before or 0
                    before = int(size)
                except ValueError:
                    continue  # cut off by a full disk
    except OSError:
        return None
    return before
