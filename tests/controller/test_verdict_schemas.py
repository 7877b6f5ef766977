"""What `--json` prints of a verdict keeps the published schemas, for every recorded case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from controller import verdict

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "tests/golden/screens").glob("*.json"))
SCHEMAS = {
    task: json.loads((ROOT / f"docs/schema/{task}.json").read_text("utf-8"))
    for task in ("status", "wait", "watch")
}


def document(task: str, case: dict[str, Any]) -> dict[str, Any]:
    told = {key: case[key] for key in ("why", "mend", "last", "container_off", "gpus") if key in case}
    found = verdict.judge(case["snapshot"], **told)
    more: dict[str, dict[str, Any]] = {
        "status": {"snapshot": case["snapshot"]},
        "wait": {"until": "healthy", "waited_s": 0.5},
        "watch": {
            "run": "r-0001",
            "looks": 3,
            "reconnects": 0,
            "seconds": 4.5,
            "notify": {"sent": ["crashed"], "failed": []},
        },
    }
    box = {"box": "lab", "vmid": 200, "exit_code": found.exit_code, **found.as_json(), **more[task]}
    return {"schema": 1, "task": task, "exit_code": found.exit_code, "boxes": [box]}


@pytest.mark.parametrize("task", SCHEMAS)
def test_every_recorded_verdict_is_valid(task: str) -> None:
    for path in CASES:
        jsonschema.validate(document(task, json.loads(path.read_text("utf-8"))), SCHEMAS[task])


@pytest.mark.parametrize("task", SCHEMAS)
def test_a_word_that_nobody_knows_and_a_missing_cause_are_not(task: str) -> None:
    good = document(task, json.loads(CASES[0].read_text("utf-8")))
    for change in ({"verdict": "fine"}, {"causes": None}, {"surprise": 1}):
        bad = {**good, "boxes": [{**good["boxes"][0], **change}]}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, SCHEMAS[task])
