"""The words of a command line that Invoke would take otherwise than they were meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.options import On, box_task

PROJECT = Path(__file__).resolve().parents[2]
PROGRAMS = {"invoke": ["-m", "invoke"], "pctrun": ["-c", "from controller.program import main; main()"]}


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("statu", "there is no task 'statu'", "did you mean 'status'? {} --list"),
        ("deploy statu", "there is no task 'statu'", "did you mean 'status'? {} --list"),
        ("--help show", "there is no task 'show'", "did you mean 'runs.show'? {} --list"),
        ("xyzzy", "there is no task 'xyzzy'", "{} --list"),
        ("abort now", "abort has no use for 'now'", "{} --help abort"),
        ("wait --util=x", "wait has no option --util", "did you mean '--until'? {} --help wait"),
        ("--dri status", "{} has no option --dri", "did you mean '--dry'? {} --help"),
        ("status --run", "--run wants a value", "{} --help status"),
        (
            "runs.show",
            "'runs.show' did not receive required positional arguments: 'run'",
            "{} --help runs.show",
        ),
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_mistyped_word_is_one_line_with_the_nearest(
    program: str, words: str, error: str, hint: str
) -> None:
    line = [sys.executable, *PROGRAMS[program], *words.split()]
    done = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=900)
    told = f"error: {error.format(program)}\nhint: {hint.format(program)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


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


def test_an_inventory_that_nobody_here_has_named_is_named(tmp_path: Path) -> None:
    """An editable copy knows its checkout's: in a folder without one it is taken, but not in silence."""
    own, checkouts = tmp_path / "own", PROJECT / "inventory.yaml"
    own.mkdir()
    (own / "inventory.yaml").write_text(checkouts.read_text())
    kept = {key: value for key, value in os.environ.items() if key != "PCTRUN_INVENTORY"}
    kept["PYTHONPATH"] = str(PROJECT)
    note = f"inventory: {checkouts} (the checkout's: none here or above)\n"
    for folder, more, told in (
        (tmp_path, {}, note),
        (PROJECT / "docs", {}, ""),
        (own, {}, ""),
        (tmp_path, {"PCTRUN_INVENTORY": str(checkouts)}, ""),
    ):
        for words in ("boxes", "-R abort"):
            line = [sys.executable, *PROGRAMS["pctrun"], *words.split()]
            done = subprocess.run(
                line, cwd=folder, env=kept | more, capture_output=True, text=True, timeout=900
            )
            assert (done.returncode, done.stderr) == (0, told), (folder, words)
            assert "sandbox" in done.stdout
