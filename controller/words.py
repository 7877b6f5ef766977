"""Ages, sizes and rates in words, one way everywhere, so that two lines can be compared."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Two units at most: `0.08s`, `4.2s`, `45s`, `3m 10s`, `2h 05m`, `5d 2h`."""
    if seconds < 0:
        seconds = 0.0
    if seconds < 0.995:
        return f"{seconds:.2f}s"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def age(seconds: float) -> str:
    """How long ago, in one unit of which there are at least two: `119s`, `2m`, `47h`, `2d`."""
    whole = max(0, int(seconds))
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= 2 * unit_s:
            return f"{whole // unit_s}{unit}"
    return f"{whole}s"


def size(count: float) -> str:
    """Binary units: `812 B`, `38.1 KiB`, `1.2 GiB`."""
    if count < 1024:
        return f"{int(count)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 999.5 or unit == "TiB":
            return f"{count:.1f} {unit}" if count < 99.95 else f"{count:.0f} {unit}"
    raise AssertionError("unreachable")


def rate(tokens_per_s: float) -> str:
    """Tokens per second: `812 tok/s`, `4.31k tok/s`, `1.20M tok/s`."""
    for unit_size, unit in ((1e6, "M"), (1e3, "k")):
        if tokens_per_s >= unit_size:
            return f"{tokens_per_s / unit_size:.2f}{unit} tok/s"
    return f"{tokens_per_s:.0f} tok/s"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cut(line: str, width: int) -> str:
    """The line without what goes beyond `width` columns; … stands for that."""
    line = line.rstrip()
    return line if len(line) <= width else f"{line[: width - 1]}…"
