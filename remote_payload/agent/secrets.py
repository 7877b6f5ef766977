"""Secrets reach the supervisor through a pipe of the agent's: no file, no argument, not tmux's environment.

The supervisor is started by the tmux server, so only an argument list comes to it from here. It opens the
agent's pipe as /proc/PID/fd/N, which the same user alone may; what was read is nowhere any more, and an
agent that dies takes the rest with it. It waits for the run's first state, and so outlives the reading.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Iterable

from agent.call import Call, Json, Refusal

LIMIT = 48 * 1024  # bytes: a pipe takes 64 KiB before anybody reads
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check(call: Call, taken: Iterable[str]) -> None:
    """Refuse variables that a run sets itself, and more than a pipe holds. No message carries a value."""
    values = environment(call.private)
    for name, value in values.items():
        if not _NAME.fullmatch(name) or name in taken or name.startswith("PCTRUN_"):
            raise Refusal(
                "usage", f"a secret cannot be called {name}: the run sets that itself", "give it another name"
            )
        if not isinstance(value, str) or "\0" in value:
            raise Refusal("usage", f"the secret {name} is not text", "variables hold text without NUL bytes")
    size = len(_packed(values))
    if size > LIMIT:
        raise Refusal("usage", f"the secrets take {size} bytes, {LIMIT} may travel", "send fewer")


def environment(private: Json) -> Json:
    """The variables for the trainer."""
    found = private.get("environment") or {}
    return found if isinstance(found, dict) else {}


def offer(private: Json) -> str:
    """A path that hands `private` to the first process that reads it, as long as this one lives."""
    reader, writer = os.pipe()
    os.write(writer, _packed(private))
    os.close(writer)
    return f"/proc/{os.getpid()}/fd/{reader}"


def take(path: str) -> dict[str, Any] | None:
    """What was offered at `path`; None when it was read before or its offerer is gone."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as pipe:
            value = json.loads(pipe.read() or b"null")
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def join(record: dict[str, Any] | None, private: Json | None) -> dict[str, Any] | None:
    """The record with the secrets in its `env`, for this process's memory alone."""
    if record is None:
        return None
    return {**record, "env": {**record["env"], **environment(private or {})}}


def lost(record: dict[str, Any]) -> list[str]:
    """The secrets that the run was started with and that did not come."""
    return [name for name in record.get("secrets") or [] if name not in record["env"]]


def _packed(private: Json) -> bytes:
    return json.dumps(private).encode()
