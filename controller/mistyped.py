"""A word that Invoke has no idea of gets one line with the nearest that it knows, and usage's exit code."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from invoke.exceptions import Exit, ParseError
from invoke.program import Program

from controller import errors
from controller.errors import Usage

_UNKNOWN = re.compile(r"No idea what ['\"](.*)['\"] is!")
_LACKING = re.compile(r"Flag <Argument: ([^ >]+).* needed value and was not given one!")
# Behind a task a word is rather an argument too many than a task; options have their dashes in common.
_ALIKE, _VERY_ALIKE = 0.6, 0.75


def tell() -> None:
    """From now on. `invoke` makes its program before it reads any tasks: the class is what is in reach."""
    for step in ("parse_tasks", "parse_cleanup"):
        setattr(Program, step, _told(getattr(Program, step)))


def _told(step: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(step)
    def whole(program: Any) -> None:
        try:
            step(program)
        except ParseError as error:
            usage = _usage(program, error)
            raise Exit(errors.describe(usage), usage.exit_code) from None

    return whole


def _usage(program: Any, error: ParseError) -> Usage:
    """What a person reads in place of Invoke's words."""
    call, task = program.binary_names[0], getattr(error.context, "name", None) or ""
    mend = f"{call} --help {task}" if task else f"{call} --list"
    unknown, lacking = _UNKNOWN.fullmatch(str(error)), _LACKING.fullmatch(str(error))
    if lacking:
        return Usage(f"--{lacking[1]} wants a value", mend)
    if not unknown:
        return Usage(str(error), mend)
    word = unknown[1]
    if word.startswith("-"):
        context = error.context if task and error.context else program.initial_context
        close = _nearest(word, context.flags, _VERY_ALIKE)
        return Usage(f"{task or call} has no option {word}", f"{close}{call} --help {task}".rstrip())
    names = program.collection.task_names
    tasks = {name for primary, others in names.items() for name in (primary, *others)}
    close = _nearest(word, tasks, _VERY_ALIKE if task else _ALIKE)
    if task and not close:
        several = "; several runs are one word, r-0003,r-0004" if task == "plot" else ""
        return Usage(f"{task} has no use for '{word}'", f"{mend}{several}")
    return Usage(f"there is no task '{word}'", f"{close}{call} --list")


def _nearest(word: str, known: Iterable[str], alike: float) -> str:
    import difflib  # only for a mistake: 3 ms

    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=alike)
    return f"did you mean '{close[0]}'? " if close else ""
