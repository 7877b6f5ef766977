"""What a look at a box means, check by check: every one is made, whatever the others found.

A check is a pure function of facts, so recorded facts are its tests. `failed`: a run cannot start, or will
not be right; `warning`: it can, but somebody should know; `skipped`: not looked at, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller import errors

Json = dict[str, Any]

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
PREFLIGHT, DEGRADED = 9, 2  # exit codes: something that a run needs is missing; something is amiss


@dataclass(frozen=True)
class Check:
    """`says` is one line, `mend` what to do about it; `code` is the exit code that a failed one asks for."""

    group: str
    name: str
    state: str
    says: str
    mend: str = ""
    code: int = PREFLIGHT

    def as_json(self) -> Json:
        document = asdict(self)
        del document["code"]
        return document


def ok(group: str, name: str, says: str) -> Check:
    return Check(group, name, OK, says)


def warning(group: str, name: str, says: str, mend: str) -> Check:
    return Check(group, name, WARNING, says, mend)


def failed(group: str, name: str, says: str, mend: str, *, code: int = PREFLIGHT) -> Check:
    return Check(group, name, FAILED, says, mend, code)


def skipped(group: str, names: Iterable[str], why: str) -> list[Check]:
    return [Check(group, name, SKIPPED, why) for name in names]


def counts(checks: Sequence[Check]) -> dict[str, int]:
    return {state: sum(check.state == state for check in checks) for state in (OK, WARNING, FAILED, SKIPPED)}


def exit_code(checks: Sequence[Check]) -> int:
    """The worst of the failed ones; 2 where nothing failed but something is amiss; else 0."""
    codes = [check.code for check in checks if check.state == FAILED]
    if codes:
        return errors.worst(codes)
    return DEGRADED if any(check.state == WARNING for check in checks) else 0
