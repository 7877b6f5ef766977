"""What every operation hands back, so that one place prints it, makes it JSON and gives the exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """`document` is the data of `--json`, `text` the same for a person (empty when it was streamed already).

    `word` is the verdict word in it, for colour. `line` stands for the text where several boxes answer.
    """

    document: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    exit_code: int = 0
    word: str = ""
    line: str = ""
