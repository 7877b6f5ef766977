"""`invoke doctor` through SSH, pct and a container, in a box that has nothing, is locked, is gone."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def look(project):
    """The box's part of the document, and its checks by name."""

    def ask(code: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        box = project.ask("doctor", code=code)
        return box, {check["name"]: check for check in box["checks"]}

    return ask


def test_a_box_with_nothing_in_it_is_told_all_that_is_missing(project, look) -> None:
    box, checks = look(code=9)
    assert box["round_trips"] == 2
    assert {name for name, check in checks.items() if check["state"] == "failed"} == {"release"}
    for name in ("ssh", "host key", "login", "pct", "container", "clock", "agent", "tmux", "disk", "python"):
        assert checks[name]["state"] == "ok", checks[name]
    assert (checks["release"]["mend"], checks["recipe"]["state"]) == ("invoke deploy", "skipped")
    assert abs(box["host"]["skew_s"]) <= box["host"]["skew_error_s"] + 1.0
    screen = project.invoke("doctor", code=9).splitlines()
    assert screen[0].startswith("sandbox/200  NOT READY  1 failed")
    assert screen[-1].split(maxsplit=1) == ["next", "release: invoke deploy"]
    assert all(len(line) <= 100 for line in screen)


def test_a_lock_and_a_box_that_is_gone(project, look) -> None:
    """The rest of the list is there each time, with the reason why it was not looked at."""
    project.invoke("exec", "true")
    config = next(project.sandbox.rglob("200.conf"))
    config.write_text(config.read_text() + "lock: backup\n")
    whole = look(code=9)[1]
    assert whole["container"]["state"] == "warning" and "locked (backup)" in whole["container"]["says"]
    config.write_text(config.read_text().replace("lock: backup\n", ""))

    project.invoke("sandbox.down")
    box, checks = look(code=7)
    assert (checks["ssh"]["state"], checks["ssh"]["mend"]) == ("failed", "invoke sandbox.up")
    assert box["round_trips"] == 0 and list(checks) == list(whole)
    project.invoke("sandbox.up")
