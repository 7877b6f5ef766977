"""What the README shows is what a person gets: its error block is run line by line, its tree is looked up."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
ROOT = Path(__file__).resolve().parents[2]


def test_every_error_of_the_readme_is_seen_as_it_is_shown(project) -> None:
    block = README.split("## Errors you may meet", 1)[1].split("```console\n", 1)[1].split("```", 1)[0]
    sessions = re.findall(r"^\$ invoke (.+?) +# exit (\d+)\n(.*?)(?=^\$|\Z)", block, re.M | re.S)
    assert len(sessions) >= 10
    for command, code, shown in sessions:
        process = project.start(*command.split(), stdout=-1, stderr=-1, stdin=-3)
        out, err = process.communicate(timeout=600)
        assert process.returncode == int(code), f"{command}: {process.returncode}\n{out}{err}"
        if shown.strip():
            assert err.strip() == shown.strip(), command
            assert out == "", command


def test_exit_codes_of_the_readme_are_those_of_the_code() -> None:
    from controller import errors, verdict

    table = README.split("## Exit codes", 1)[1].split("##", 1)[0]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)}
    kinds = [errors.PctrunError, *_descendants(errors.PctrunError)]
    assert told == {0, *verdict.EXIT_CODES.values(), *(kind.exit_code for kind in kinds)}


def _descendants(kind: type) -> list[type]:
    return [deeper for child in kind.__subclasses__() for deeper in (child, *_descendants(child))]


@pytest.mark.parametrize(
    "name", re.findall(r"\b[a-z_]+\.py\b", README.split("## The tree", 1)[1].split("## Limits", 1)[0])
)
def test_every_file_of_the_tree_exists(name: str) -> None:
    known = subprocess.run(
        ["find", "-name", name, "-not", "-path", "./.venv/*"], cwd=ROOT, capture_output=True, text=True
    )
    assert known.stdout.strip(), name
