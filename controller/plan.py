"""What a task would do, as text: `invoke -R` shows it without a connection and without a sandbox."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from controller import words
from controller.inventory import Box


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


def text(plan: Plan, box: Box) -> str:
    """The plan for a person."""
    where = "the embedded sandbox" if box.sandbox else str(box.host)
    lines = [f"{box.label}  {plan.task} would take {plan.cost} on {where}; nothing was sent"]
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"  {number}  {step.text}{' (only if asked for)' if step.maybe else ''}")
        if step.verb:
            request = json.dumps(step.args, sort_keys=True, ensure_ascii=False)
            lines.append(f"     {step.verb} {request}")
        if step.stream_bytes:
            lines.append(f"     + at most {words.size(step.stream_bytes)} on stdin")
    return "\n".join(lines)


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
