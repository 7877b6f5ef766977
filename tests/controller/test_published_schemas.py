"""Every task that can print JSON has a published schema, which its refusals and its plans keep, too."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from invoke.program import Program

from controller import tasks

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schema"
NAMES = sorted(tasks.namespace.task_names)
EMBEDDED = [name for name in NAMES if name.startswith("sandbox.")]
WANTED = {"env.build": ("--name", "cpu"), "runs.prune": ("--keep", "3")}  # without which they only refuse
INVENTORY = "default: lab\nboxes:\n  lab: {host: 127.0.0.1, port: 1, vmid: 200, recipe: smollm2-135m}\n"


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("PCTRUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.setenv("PCTRUN_SANDBOX", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PCTRUN_STATE", str(tmp_path / "state"))


def printed(name: str, *options: str, dry: bool = False) -> dict[str, Any]:
    """The document of `invoke name …`, when it keeps its schema."""
    commands = copy.deepcopy(tasks.namespace)  # Invoke takes the help out of the tasks that it parses for
    arguments = copy.deepcopy(commands[name]).get_arguments()
    needed = [each for each in arguments if each.positional and each.default is None]
    command = ["invoke", *(["-R"] if dry else []), name, *("r-0001" for _ in needed)]
    command += [*WANTED.get(name, ()), *options, "--json"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        Program(namespace=commands).run(command)
    document: dict[str, Any] = json.loads(out.getvalue())
    schema = json.loads((SCHEMAS / f"{document['task']}.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    return document


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EMBEDDED])
def test_a_refusal_keeps_the_schema_of(name: str) -> None:
    assert "nope" in printed(name, "--box", "nope")["error"]["message"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "boxes"])
def test_a_plan_keeps_the_schema_of(name: str) -> None:
    document = printed(name, dry=True)
    assert document["boxes"][0]["plan"] if name not in EMBEDDED else document["plan"]


def test_the_list_of_boxes_keeps_its_schema() -> None:
    assert [box["name"] for box in printed("boxes")["boxes"]] == ["lab"]


def test_no_schema_is_left_without_its_task() -> None:
    told = {printed(name, dry=True)["task"] for name in EMBEDDED} | {"boxes"}
    told |= {printed(name, "--box", "nope")["task"] for name in NAMES if name not in EMBEDDED}
    told.add("init")  # of `pctrun` alone: tests/packaging
    assert {path.stem for path in SCHEMAS.glob("*.json")} == told
