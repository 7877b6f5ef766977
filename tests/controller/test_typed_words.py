"""The words of a command line that Invoke would take otherwise than they were meant."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from controller.options import On, box_task


def test_which_options_have_a_word_of_their_own_follows_from_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A word behind a flag is the positional argument, so the words behind the dashes are not."""

    def positional(line: str) -> tuple[str, ...]:
        monkeypatch.setattr(sys, "argv", ["invoke", *line.split()])

        @box_task(name="go", positional=("what",), or_dashes=True)
        def go(on: On, what: Any = None, into_: str = "", deep_down: bool = False) -> None: ...

        return tuple(vars(go)["positional"])

    for own in ("", "--into a", "--box lab --into=a --deep-down", "--json --into a --all"):
        assert positional(f"go {own} -- ls") == ()
    for own in ("a", "--deep-down a", "--into a b", "--json a"):
        assert positional(f"go {own} -- ls") == ("what",)
