"""A GPU's own errors (Xid) stand in the kernel's log, which a container shares with its host."""

from __future__ import annotations

import ctypes
import re
import time
from typing import Any

LAST = 20
_READ_ALL, _SIZE = 3, 10  # syslog(2)
_XID = re.compile(r"^(?:<\d+>)?\[\s*([\d.]+)\] NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+), ?(.*)$")


def xids() -> list[dict[str, Any]] | None:
    """The newest `{at, bus, number, text}`, oldest first; None where the log may not be read."""
    text = _read()
    return None if text is None else parse(text, time.time() - time.clock_gettime(time.CLOCK_MONOTONIC))


def parse(text: str, booted: float) -> list[dict[str, Any]]:
    """`booted`: the epoch second that the log's own times count from."""
    found = [match for line in text.splitlines() if (match := _XID.match(line))]
    return [
        {"at": booted + float(each[1]), "bus": each[2], "number": int(each[3]), "text": each[4][:200]}
        for each in found[-LAST:]
    ]


def _read() -> str | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).klogctl
        size = call(_SIZE, None, 0)
        if size <= 0:
            return None
        buffer = ctypes.create_string_buffer(size)
        got = call(_READ_ALL, buffer, size)
    except (OSError, AttributeError):  # no such function in this C library
        return None
    return buffer.raw[:got].decode("utf-8", "replace") if got >= 0 else None
