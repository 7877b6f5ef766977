"""Lines of a log carry no time, and `logs --since` needs one: where it ended, noted every few seconds."""

from __future__ import annotations

import os
import time

NAME = "log.times"
EVERY_S = 5.0
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
