"""Every expected failure in one tree: one place decides what a person reads and what a script gets.

PctrunError                 1  anything expected that has no better word
├── Usage                   1  an option, argument or state in which the request makes no sense
│   └── InventoryError      1  inventory.yaml cannot be read as it stands
├── Declined                1  a person was asked, and said no
├── ProtocolError           1  the other side does not speak our frames
├── AgentFailed             1  the agent broke; what it did is unknown
├── RunDied                 4  the trainer ended before it wrote its first state
├── NotRunning              5  there is no such run, or the container is off
├── Unreachable             7  nothing is known about the run; never to be read as dead
│   ├── HostKeyRefused      7  the host is not the one we know
│   ├── LoginRefused        7  the host does not let us in
│   ├── PctRefused          7  the host is there, `pct` cannot reach the container
│   └── ConnectionLost      7  it was there, then it was not
├── Locked                  8  another operator is at work
├── PreflightFailed         9  something that a run needs is missing
├── WaitTimedOut           10  the wanted verdict did not come in time
└── Detached              130  Ctrl-C: only this side stopped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PctrunError(Exception):
    """`message`: one line, what is wrong and where; `hint`: the mend; `evidence`: lines to show below.

    `details` are the facts that came with it, for `--json`.
    """

    exit_code = 1
    kind = "error"

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        kind: str = "",
        evidence: Sequence[str] = (),
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.details = dict(details or {})
        self.message = message
        self.hint = hint
        self.kind = kind or type(self).kind
        self.evidence = tuple(evidence)


class Usage(PctrunError):
    kind = "usage"


class InventoryError(Usage):
    kind = "inventory"


class Declined(PctrunError):
    kind = "declined"


class ProtocolError(PctrunError):
    kind = "protocol"


class AgentFailed(PctrunError):
    kind = "internal"


class RunDied(PctrunError):
    exit_code = 4
    kind = "died"


class NotRunning(PctrunError):
    exit_code = 5
    kind = "not-running"


class Unreachable(PctrunError):
    exit_code = 7
    kind = "unreachable"


class HostKeyRefused(Unreachable):
    kind = "host-key"


class LoginRefused(Unreachable):
    kind = "login"


class PctRefused(Unreachable):
    kind = "pct"


class ConnectionLost(Unreachable):
    kind = "connection-lost"


class Locked(PctrunError):
    exit_code = 8
    kind = "locked"


class PreflightFailed(PctrunError):
    exit_code = 9
    kind = "preflight"


class WaitTimedOut(PctrunError):
    exit_code = 10
    kind = "timeout"


class Detached(PctrunError):
    exit_code = 130
    kind = "detached"


_AS_WISHED = (Declined, Detached)  # no fault of anything: told calmly, though not everything was done

# Time does not mend them, and a host that counts failed logins would lock us out: nothing tries these again.
FINAL = (HostKeyRefused, LoginRefused)

_AGENT_KINDS: dict[str, type[PctrunError]] = {
    "usage": Usage,
    "run-alive": Usage,
    "died": RunDied,
    "no-run": NotRunning,
    "locked": Locked,
    "internal": AgentFailed,
    **dict.fromkeys(
        (
            "no-release",
            "no-recipe",
            "no-model",
            "no-data",
            "no-python",
            "disk",
            "import-check",
            "verify",
            "kernels",
            "environment",
        ),
        PreflightFailed,
    ),
}


def from_agent(error: Mapping[str, Any]) -> PctrunError:
    """The exception for the `error` object of an `end` frame; an unknown kind is the agent's own failure."""
    kind = str(error.get("kind") or "internal")
    log = error.get("log")
    return _AGENT_KINDS.get(kind, AgentFailed)(
        str(error.get("message") or "the agent gave no reason"),
        str(error.get("hint") or ""),
        kind=kind,
        evidence=[str(line) for line in log] if isinstance(log, list) else (),
        details={key: error[key] for key in error.keys() - {"kind", "message", "hint", "log"}},
    )


def describe(error: PctrunError) -> str:
    """What a person reads on stderr: the line, its evidence, the mend."""
    lines = [f"{'note' if isinstance(error, _AS_WISHED) else 'error'}: {error.message}"]
    lines += [f"  | {line}" for line in error.evidence]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)


def as_json(error: PctrunError) -> dict[str, object]:
    """The same for a script."""
    return {
        "kind": error.kind,
        "message": error.message,
        "hint": error.hint,
        "evidence": list(error.evidence),
        **error.details,
    }


# Mildest first. A number alone does not order them: 6 (warming up) is milder than 2 (degraded).
_SEVERITY = (0, 6, 5, 2, 130, 10, 3, 8, 9, 7, 4, 1)


def worst(codes: Sequence[int]) -> int:
    """One exit code for several boxes; a code of a remote command that is not ours counts as 1."""
    return max(
        codes, key=lambda code: _SEVERITY.index(code) if code in _SEVERITY else len(_SEVERITY), default=0
    )
