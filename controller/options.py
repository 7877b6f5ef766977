"""What the tasks share: how an option is declared, and the options by which each knows its boxes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

from controller import typed

Body = Callable[..., None]

JSON: dict[str, Any] = {"json": "print one JSON document on stdout"}
SLOW: dict[str, Any] = {"allow_slow_kernels": "go on although only reference kernels are there"}
RUN: dict[str, Any] = {"run": "run id such as r-0003 (default: the newest)"}
_BOX: dict[str, Any] = {
    "box": "box of the inventory; repeat it for several (default: its default)",
    "all": "all boxes of the inventory, at once",
    **JSON,
}


def cli() -> Any:
    """Imported here and not above: `invoke --list` must not pay for SSH and validation."""
    try:
        from controller import cli as made
    except KeyboardInterrupt:  # Invoke would end with 1 and without a word
        raise Exit("note: interrupted before anything was done", code=130) from None
    return made


class On(NamedTuple):
    """Where a task is to act, and how it answers. Called with an operation's name and options it acts."""

    boxes: list[str]
    every: bool
    as_json: bool
    dry: bool

    def __call__(self, name: str, **options: Any) -> None:
        where: dict[str, Any] = {"boxes": self.boxes, "every": self.every}
        cli().operate(name, **where, as_json=self.as_json, dry=self.dry, **options)


def plain_task(
    *iterable: str,
    name: str = "",
    positional: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    default: bool = False,
    or_dashes: bool = False,
    **help_: Any,
) -> Callable[[Body], Body]:
    """A task of Invoke's. `optional`: options that may stand with or without a value. `or_dashes`: words
    behind a `--` may stand in place of the positional arguments.

    Short flags are off: a parameter that begins with h would take -h away from --help.
    """
    typed.may_repeat(iterable)

    def decorate(body: Body) -> Body:
        dashes = or_dashes and typed.begins_with_dashes(name, _valued(body))
        made: Body = task(
            name=name or None,
            iterable=iterable,
            positional=() if dashes else positional,
            optional=optional,
            default=default,
            auto_shortflags=False,
            help={key.rstrip("_"): f"{text}{_bare(key, positional)}" for key, text in help_.items()},
        )(body)
        return made

    return decorate


def _valued(body: Body) -> list[str]:
    """The options of a task that take a value, as they are typed: all but truth values, which are flags."""
    _, *own = inspect.signature(body).parameters.values()
    return [typed.flag(each.name) for each in own if not isinstance(each.default, bool)]


def _bare(key: str, positional: tuple[str, ...]) -> str:
    """What Invoke's help does not say of a positional argument."""
    return f" (may stand without --{key})" if key in positional else ""


def _shared(c: Context, box: Any = None, all_: bool = False, json_: bool = False) -> None:
    """The options of every task that acts on boxes."""


def box_task(*iterable: str, **options: Any) -> Callable[[Body], Body]:
    """A task whose body takes an `On` and its own options; the command line knows those of `_shared`, too."""

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def whole(c: Context, box: Any = None, all_: bool = False, json_: bool = False, **own: Any) -> None:
            body(On(list(box or ()), all_, json_, bool(c.config.run.dry)), **own)

        context, *shared = inspect.signature(_shared).parameters.values()
        _, *own_options = inspect.signature(body).parameters.values()
        whole.__dict__["__signature__"] = inspect.Signature([context, *own_options, *shared])
        return plain_task("box", *iterable, **options, **_BOX)(whole)

    return decorate


def named(run: str | None) -> str:
    """A run that was named, or empty for the newest."""
    return "" if run in (None, "newest") else str(run)
