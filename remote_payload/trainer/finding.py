"""A check that a person acts on: a word, what is so, and the mend; for screens and programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """`verdict` is ok, warn (it serves, but look) or FAIL (a server refuses it or drafts wrongly)."""

    verdict: str
    what: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<4}  {self.what}" + (f": {self.mend}" if self.mend else "")


def ok(what: str) -> Finding:
    return Finding(OK, what)


def warn(what: str, mend: str) -> Finding:
    return Finding(WARN, what, mend)


def fail(what: str, mend: str) -> Finding:
    return Finding(FAIL, what, mend)


def or_ok(problems: Iterator[Finding], what: str) -> list[Finding]:
    """The problems, or one `ok` line when there are none."""
    return list(problems) or [ok(what)]
