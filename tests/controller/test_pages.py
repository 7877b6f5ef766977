"""Every command that a page shows is one that can be typed."""

from __future__ import annotations

import copy
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from invoke.program import Program

from controller.tasks import namespace

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/guide.md")
BOXES = """default: sandbox
boxes:
  sandbox: {sandbox: true, vmid: 200, recipe: smollm2-135m}
  lab: {host: pve1, vmid: 201, recipe: qwen3.6-27b}
  attic: {host: pve2, vmid: 202, recipe: qwen3.6-27b}
"""


def shown() -> list[tuple[str, str, bool]]:
    """(page, what follows `$ invoke`, whether an error is shown for it), without the remark behind it."""
    commands = []
    for page in PAGES:
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        for line, answer in pairwise([*lines, ""]):
            if match := re.match(r"\$ (?:invoke|pctrun) (?!init)(.+?)(?:\s+#.*)?$", line):
                commands += [
                    (page, one.removeprefix("invoke ").removeprefix("pctrun "), answer.startswith("error: "))
                    for one in match[1].split(" && ")
                ]
    return commands


def test_the_pages_show_commands():
    assert {page for page, _, _ in shown()} == set(PAGES)
    assert len(shown()) > 30


@pytest.mark.parametrize(("page", "command", "fails"), shown())
def test_a_command_of_a_page_can_be_planned(page, command, fails, tmp_path, monkeypatch, capsys):
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(BOXES)
    monkeypatch.setenv("PCTRUN_INVENTORY", str(inventory))
    monkeypatch.setenv("PCTRUN_STATE", str(tmp_path / "state"))
    own = copy.deepcopy(namespace)  # parsing takes the help texts out of the tasks
    program = Program(namespace=own, name="invoke", binary_names=["invoke"])
    code: object = 0  # an error that only the container knows of leaves it so
    try:
        program.run(["invoke", "-R", *shlex.split(command)])
    except SystemExit as end:
        code = end.code
    assert not code or fails, capsys.readouterr().err
    assert not (tmp_path / "state").exists()
