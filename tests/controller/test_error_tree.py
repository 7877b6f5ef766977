"""Errors: the documented exit codes, the agent's kinds, the words for a person and for a script."""

from __future__ import annotations

import re

import pytest

from controller import errors
from controller.inventory import PROJECT


def tree() -> dict[str, type[errors.PctrunError]]:
    return {
        name: found
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, errors.PctrunError)
    }


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = re.findall(r"^([│├└─ ]*)([A-Z]\w+) +(\d+) ", errors.__doc__ or "", re.MULTILINE)
    assert {name: int(code) for _, name, code in drawn} == {
        name: found.exit_code for name, found in tree().items()
    }


def test_every_error_kind_of_the_contract_has_the_contracts_code() -> None:
    text = (PROJECT / "docs" / "architecture.md").read_text("utf-8")
    sentence = text.split("Error kinds and the controller's exit code:")[1].split(".\n")[0]
    kinds = {kind: int(code) for kind, code in re.findall(r"`([a-z-]+)` (\d+)", sentence)}
    assert len(kinds) >= 14
    found = {kind: errors.from_agent({"kind": kind, "message": "m"}).exit_code for kind in kinds}
    assert found == kinds


def test_an_unknown_kind_is_the_agents_failure_and_keeps_its_name() -> None:
    error = errors.from_agent({"kind": "novel", "message": "m", "hint": "h"})
    assert (type(error), error.kind, error.exit_code) == (errors.AgentFailed, "novel", 1)


def test_a_death_shows_its_last_lines_between_the_error_and_the_hint() -> None:
    error = errors.from_agent(
        {"kind": "died", "message": "m", "hint": "h", "log": ["a", "b"], "run": "r-0001"}
    )
    assert errors.describe(error) == "error: m\n  | a\n  | b\nhint: h"
    assert errors.as_json(error) == {
        "kind": "died",
        "message": "m",
        "hint": "h",
        "evidence": ["a", "b"],
        "run": "r-0001",
    }


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 6], 6), ([6, 2, 3], 3), ([7, 4, 0], 4), ([5, 7], 7), ([0, 42, 4], 42)],
)
def test_the_worst_of_several_codes(codes: list[int], code: int) -> None:
    assert errors.worst(codes) == code
