"""The doctor's screen: a line a check, the mend under what is not right, what to do first at the end."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from controller.checks import FAILED, OK, SKIPPED, WARNING, Check, counts

WIDTH = 100
_MARKS = {OK: "✓ ok", WARNING: "! warn", FAILED: "✗ FAIL", SKIPPED: "– skip"}
_INDENT = 32  # where the words begin: group, mark and name stand before them


def screen(label: str, checks: Sequence[Check], alive: Sequence[str] = (), *, width: int = WIDTH) -> str:
    """Plain text of at most `width` columns; nothing is cut, because a mend is there to be copied.

    `alive`: ids of the runs that live in the container.
    """
    lines = [f"{label}  {_headline(checks)}"]
    shown = ""
    for check in _folded(checks):
        group = "" if check.group == shown else check.group
        shown = check.group
        head = f"  {group:<9}  {_MARKS[check.state]:<6}  {check.name}"
        lines += _wrapped(head, check.says, width)
        if check.mend and check.state in (WARNING, FAILED):
            lines += _wrapped(" " * 21 + "mend", check.mend, width)
    for number, text in enumerate(_next(checks, alive)):
        lines += _wrapped("" if number else "  next", text, width, indent=13)
    return "\n".join(lines)


def _headline(checks: Sequence[Check]) -> str:
    number = counts(checks)
    parts = [f"{number[FAILED]} failed" if number[FAILED] else "nothing failed"]
    if number[WARNING]:
        parts.append(f"{number[WARNING]} to look at")
    parts.append(f"{number[OK]} ok")
    if number[SKIPPED]:
        parts.append(f"{number[SKIPPED]} skipped")
    return f"{word(checks).upper()}  {', '.join(parts)}"


def word(checks: Sequence[Check]) -> str:
    """The headline's first, for colour."""
    return "not ready" if counts(checks)[FAILED] else "ready"


def _folded(checks: Sequence[Check]) -> Iterator[Check]:
    """Neighbours of one group that were skipped for the same reason are one line."""
    for _, found in groupby(checks, key=lambda check: (check.group, check.state, check.says)):
        rows = list(found)
        if rows[0].state == SKIPPED and len(rows) > 1:
            names = ", ".join(row.name for row in rows)
            yield Check(rows[0].group, "", SKIPPED, f"{names}: {rows[0].says}")
        else:
            yield from rows


def _wrapped(head: str, says: str, width: int, indent: int = _INDENT) -> list[str]:
    first = f"{head:<{indent - 1}} "
    clean = "".join(letter if letter.isprintable() else " " for letter in says)
    return textwrap.wrap(
        clean,
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _next(checks: Sequence[Check], alive: Sequence[str]) -> list[str]:
    """The first mend: what comes before it on the way is right, and what comes after may depend on it.

    A run that lives is not to be stopped by a person who follows the last line.
    """
    wrong = [check for state in (FAILED, WARNING) for check in checks if check.state == state]
    mends = [f"{check.name}: {check.mend}" for check in wrong[:1]]
    if alive:
        lives = f"{' and '.join(alive)} {'are' if len(alive) > 1 else 'is'} alive"
        return [*mends, f"invoke status   |   invoke watch   ({lives})"]
    return mends or ["invoke restart"]
