"""What was typed, where Invoke passes it on changed: the words themselves decide."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Sequence

from controller.errors import Usage

_repeatable: set[str] = set()


def flag(parameter: str) -> str:
    """How a task's parameter is typed: `from_` as --from."""
    return f"--{parameter.rstrip('_').replace('_', '-')}"


def may_repeat(parameters: Iterable[str]) -> None:
    """These parameters of a task are options that may be given more than once."""
    _repeatable.update(map(flag, parameters))


def check(words: Sequence[str]) -> None:
    """To Invoke a repeatable option that lacks its value was not given: `abort --box $EMPTY` would act on the
    default box. Raises Usage."""
    for word, follows in itertools.pairwise([*words, "--"]):
        if word == "--":
            return
        if word in _repeatable and follows.startswith("--"):
            meant = "" if follows == "--" else f" (if {follows} is the value: {word}={follows})"
            raise Usage(f"{word} wants a value", f"is a variable of your shell empty?{meant}")


def begins_with_dashes(task: str, valued: Collection[str]) -> bool:
    """Whether only options stand between `task` and a `--` (those in `valued` with a word of their own): to
    Invoke its positional argument would be missing.
    """
    before = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else []
    own = before[before.index(task) + 1 :] if task in before else [task]
    return all(word.startswith("-") or last in valued for last, word in itertools.pairwise(["", *own]))


def after_dashes() -> list[str]:
    """What was typed behind a `--`, word by word: Invoke has it as one text."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
