"""A run's truth lies in files that others write at any moment: reading forgives, writing is atomic."""

from __future__ import annotations

import json
import math
import os
import re
import time
from typing import Any

TRACEBACK_WINDOW = 64 * 1024  # bytes of log looked at for a traceback
TRACEBACK_LINES = 60
ATTEMPT = "· attempt "  # how the supervisor's line begins that stands in the log before another attempt
_HANG = "no thread has moved for "  # the trainer's watchdog: who hangs, then the stacks
_TRACEBACK_START = re.compile(
    rf"Traceback \(most recent call last\):|Fatal Python error: |^Timeout \(\d+:\d\d:\d\d\)!|^{_HANG}", re.M
)


def read_json(path: str) -> dict[str, Any] | None:
    """The object in `path`; None when it is missing, half-written or not an object."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str, value: dict[str, Any]) -> None:
    """Replace `path` as one step: a reader sees the old or the new, also after a power cut."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        remove_quietly(temporary)
        raise placed(error, path) from None


def placed(error: BaseException, path: str) -> BaseException:
    """The same error; one of a write, which does not say where, gets the file's name."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = path
    return error


def size_words(count: float) -> str:
    """Bytes for a person, in the controller's units: `812 B`, `38.1 KiB`, `67.1 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, int(math.log(count, 1024)))
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB"


def tree_bytes(path: str, limit_s: float = math.inf) -> tuple[int, bool]:
    """The sizes of the files below a folder, links not followed; False when `limit_s` did not suffice."""
    total, ends = 0, time.monotonic() + limit_s
    for base, _, names in os.walk(path):
        if time.monotonic() > ends:
            return total, False
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total, True


def closed_to_us(folder: str) -> str | None:
    """The first folder or file in `folder` that we may not read, or None. Root may be refused, too: what lies
    on the host belongs to nobody in an unprivileged container."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return folder
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and not os.access(path, os.R_OK):
            return path
    return None


def remove_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def number(facts: dict[str, Any] | None, key: str) -> float | None:
    """`facts[key]` when it is a number, else None."""
    value = (facts or {}).get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def tail_offset(path: str, lines: int, limit: int) -> int:
    """Where the last `lines` lines begin, read backwards in 64 KiB steps, never more than `limit` bytes."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        if lines <= 0 or not end:
            return end
        floor = max(0, end - limit)
        at, wanted = end, lines
        file.seek(end - 1)
        if file.read(1) != b"\n":
            wanted -= 1  # the line in progress has no newline to count
        while at > floor:
            start = max(floor, at - 64 * 1024)
            file.seek(start)
            chunk = file.read(at - start)
            newlines = chunk.count(b"\n")
            if newlines > wanted:
                for _ in range(newlines - wanted):
                    cut = chunk.index(b"\n")
                    start += cut + 1
                    chunk = chunk[cut + 1 :]
                return start
            wanted -= newlines
            at = start
        return floor


def tail_lines(path: str, lines: int, limit: int = 256 * 1024) -> list[str]:
    """The last `lines` lines as text, progress bars (`\\r`) cut to their last state; [] when unreadable."""
    try:
        start = tail_offset(path, lines, limit)
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(limit)
    except OSError:
        return []
    text = data.decode("utf-8", "replace")
    return (
        [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n") if line][-lines:] if lines else []
    )


def tail_objects(path: str, lines: int) -> list[dict[str, Any]]:
    """The last JSON objects of a file of one object a line; damaged lines are left out."""
    found = []
    for line in tail_lines(path, lines):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def begins_traceback(lines: bytes) -> bool:
    """Whether lines that a log has grown by may give it another `last_traceback`."""
    return _TRACEBACK_START.search(lines.decode("utf-8", "replace")) is not None


def last_traceback(path: str) -> list[str]:
    """The last Python traceback (or faulthandler's or watchdog's report) of the last attempt; or [].

    64 KiB are looked through.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TRACEBACK_WINDOW))
            text = file.read(TRACEBACK_WINDOW).decode("utf-8", "replace")
    except OSError:
        return []
    text = text[max(0, text.rfind(f"\n{ATTEMPT}")) :]
    starts = list(_TRACEBACK_START.finditer(text))
    if not starts:
        return []
    block = text[starts[-1].start() :].split("\n")
    if block[0].startswith(("Fatal", "Timeout")):  # faulthandler: the second when no Python code could run
        end = next((i for i, line in enumerate(block) if i > 2 and not line.strip()), len(block))
        return block[: min(end, TRACEBACK_LINES)]
    if block[0].startswith(_HANG):
        mine = (" ", "stack of ")
        end = next((i for i, line in enumerate(block) if i and not line.startswith(mine)), len(block))
        return block[: min(end, TRACEBACK_LINES)]
    # the frames are indented; the first line that is not carries the exception
    end = next((i for i, line in enumerate(block) if i and line and not line[0].isspace()), len(block) - 1)
    frames, message = block[:end], block[end : end + 1]
    if len(frames) >= TRACEBACK_LINES:
        frames = [frames[0], "  ...", *frames[-TRACEBACK_LINES:]]
    return frames + message
