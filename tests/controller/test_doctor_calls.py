"""doctor through a real SSH server, `pct` and container, where each part of the way is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controller import checks, doctor, hostlook, links, sandbox
from controller.console import Console
from controller.endpoint import resolve
from controller.inventory import Box
from controller.transport import Link

RealBox = Callable[..., Box]


def look(box: Box) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, checks by name, screen."""
    outcome = doctor.run(box, Console(), quick=True)
    return outcome.exit_code, {check["name"]: check for check in outcome.document["checks"]}, outcome.text


def test_host_and_container_are_asked_once_each(box: Box) -> None:
    before = links.round_trips(box)
    outcome = doctor.run(box, Console())
    assert outcome.document["round_trips"] == 2
    assert links.round_trips(box) - before == 1, "one pct exec; the host's part is a plain command"
    assert outcome.document["host"]["whole"] and outcome.document["host"]["status"] == "running"
    assert outcome.document["container"]["kernels"] == {"skipped": "there is no GPU to prove them on"}


def test_a_container_that_is_off_leaves_the_host_and_the_whole_list(
    real_box: RealBox, embedded: sandbox.Endpoint
) -> None:
    off = real_box()
    host = Link(resolve(off))

    def pct(action: str) -> int | None:
        line = f"pct {action} {embedded.vmid}"
        return host.run(line, on_stdout=lambda data: None, on_stderr=lambda data: None)

    whole = look(off)[1]
    assert pct("stop") == 0
    try:
        code, found, screen = look(off)
        assert code == 5
        assert found["container"]["mend"] == f"on {embedded.host}: pct start {embedded.vmid}"
        assert found["clock"]["state"] == "ok"
        assert found["agent"]["state"] == found["kernels"]["state"] == "skipped"
        assert list(found) == list(whole)
        assert "1 failed" in screen.splitlines()[0]
    finally:
        assert pct("start") == 0
        host.close()


def test_a_container_of_another_node_is_explained_once(real_box: RealBox) -> None:
    code, found, _ = look(real_box(vmid=999))
    assert code == 7
    assert "does not exist" in found["container"]["says"] and "pvesh" in found["container"]["mend"]
    assert [name for name, check in found.items() if check["state"] == checks.FAILED] == ["container"]


@pytest.mark.parametrize(
    ("wrong", "name", "mend"),
    [
        ({"port": 1}, "ssh", "is port: right?"),
        ({"host_key": "SHA256:" + "A" * 43}, "host key", "change host_key: in inventory.yaml"),
        ({"user": "nobody-here"}, "login", "authorized_keys"),
    ],
)
def test_the_step_of_the_way_that_is_missing_is_named(
    real_box: RealBox, wrong: dict[str, Any], name: str, mend: str
) -> None:
    code, found, screen = look(real_box(**wrong))
    assert code == 7
    assert [check["name"] for check in found.values() if check["state"] == checks.FAILED] == [name]
    assert mend in found[name]["mend"]
    before = list(found)[: list(found).index(name)]
    assert all(found[each]["state"] == checks.OK for each in before)
    assert f"{name}: {found[name]['mend'][:20]}" in screen, "what to do first is the last thing on the screen"


def test_an_agent_that_cannot_run_is_said_and_the_host_is_looked_at(real_box: RealBox) -> None:
    code, found, _ = look(real_box(agent_python="/nowhere/python3"))
    assert code == 9
    assert found["container"]["state"] == "ok"
    assert "has no /nowhere/python3" in found["agent"]["says"] and "apt-get" in found["agent"]["mend"]


def test_the_clock_is_compared_within_the_time_that_the_way_takes(box: Box) -> None:
    seen = hostlook.look(links.get(box))
    assert seen.skew_s is not None and abs(seen.skew_s) <= seen.skew_error_s + 0.05
    assert 0 < seen.skew_error_s < 30


def test_lines_of_the_host_are_told_from_a_banner_and_from_warnings() -> None:
    noise = "Welcome!\nperl: warning: Setting locale failed.\nab1 now 9\n"
    text = f"{noise}ab12 now 5.5\nab12 xid [1.0] a: b\nab12 xid c"
    assert hostlook.parse(text, "ab12") == {"now": ["5.5"], "xid": ["[1.0] a: b", "c"]}
