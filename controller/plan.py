"""What a task would do, as text: `invoke -R` shows it without a connection and without a sandbox."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from controller import render, words
from controller.inventory import Box

_MARGIN = " " * 5


@dataclass(frozen=True)
class Step:
    """One thing to be done: a verb of the agent (one `pct exec`), or without `verb` something local."""

    text: str
    verb: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    stream_bytes: int = 0  # what follows the request on stdin, at most
    maybe: bool = False  # only if an earlier answer asks for it


@dataclass(frozen=True)
class Plan:
    task: str
    steps: tuple[Step, ...]

    @property
    def cost(self) -> str:
        """Round trips in words."""
        least = sum(1 for step in self.steps if step.verb and not step.maybe)
        most = sum(1 for step in self.steps if step.verb)
        if not most:
            return "no pct exec"
        return f"{least} pct exec" if least == most else f"{least} to {most} pct exec"


def planned_python(box: Box) -> str:
    """The run's interpreter; an embedded box says which only once it is up."""
    own = box.sandbox and "python" not in box.given
    return "(the sandbox's own)" if own else box.python


def text(plan: Plan, box: Box, *, width: int = render.WIDTH) -> str:
    """The plan for a person, in lines of at most `width` where their parts allow it."""
    where = "the embedded sandbox" if box.sandbox else str(box.host)
    head = f"{box.label}  {plan.task} would take {plan.cost} on {where}; nothing was sent"
    lines = textwrap.wrap(head, width, subsequent_indent=_MARGIN)
    for number, step in enumerate(plan.steps, 1):
        what = f"{step.text}{' (only if asked for)' if step.maybe else ''}"
        lines += textwrap.wrap(what, width, initial_indent=f"  {number}  ", subsequent_indent=_MARGIN)
        if step.verb:
            shown = [step.verb, *_told(step.args)]
            lines += [_MARGIN + line for line in render.flowing(shown, "  ", width - len(_MARGIN))]
        if step.stream_bytes:
            lines.append(f"{_MARGIN}+ at most {words.size(step.stream_bytes)} on stdin")
    return "\n".join(lines)


def _told(args: dict[str, Any]) -> Iterator[str]:
    """`key=value` of what is asked for; what is left to the agent (null) stands in --json."""
    for key, value in sorted(args.items()):
        if value is not None:
            plain = isinstance(value, str) and value and not re.search(r"[\s\"]", value)
            yield f"{key}={value if plain else json.dumps(value, sort_keys=True, ensure_ascii=False)}"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for a script."""
    return {
        "plan": [
            {
                "text": step.text,
                "verb": step.verb or None,
                "args": step.args,
                "stream_bytes": step.stream_bytes,
                "maybe": step.maybe,
            }
            for step in plan.steps
        ],
        "round_trips": plan.cost,
    }
