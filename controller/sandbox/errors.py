"""The one exception of the sandbox: a line that says what is wrong and a line that mends it."""

from __future__ import annotations


class SandboxError(Exception):
    """An expected failure. `message` is what happened, `hint` is the mend (may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
