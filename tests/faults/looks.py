"""One look as a person has it, at a run that the agent's tests started: the verdict and its whole screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from controller import render, verdict
from tests.agent.conftest import Box


@dataclass(frozen=True)
class Look:
    word: str
    exit_code: int
    screen: str
    causes: tuple[str, ...]
    run: dict[str, Any]


def look(box: Box, run: str | None = None, *, later_s: float = 0.0, **args: Any) -> Look:
    """`later_s`: as it would be judged that much later, had nothing moved since. `args`: the snapshot's."""
    snapshot = box.call("snapshot", run=run, **args).result
    snapshot["now"] += later_s
    found = verdict.judge(snapshot)
    screen = render.screen("lab/200", found, snapshot)
    return Look(found.word, found.exit_code, screen, found.causes, snapshot["run"])
