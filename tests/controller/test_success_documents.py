"""What `--json` prints when all went well keeps its published schema, too: real answers of a real box.

`Said.json` and the project of tests/integration hold every document that they read against its schema; here
are the tasks whose documents nothing else there reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import pytest

from controller import sandbox_tasks
from tests.faults.house import House, open_house


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as made:
        assert made.type("deploy").code == 0
        yield made


def test_of_a_run_that_is_waited_for_and_looked_at(house: House) -> None:
    run = house.type("restart", "--json").json["start"]["run"]
    waited = house.type("wait", "--json", "--until=warming-up,healthy,degraded", "--timeout=300")
    assert waited.code == 0 and waited.json["waited_s"] >= 0
    attached = house.type("attach", "--json")
    assert (attached.code, attached.json["run"]) == (0, run) and attached.json["argv"][0] == "ssh"
    assert house.type("abort", "--json").json["run"] == run
    ended = house.type("wait", "--json", "--until=stopped")
    assert (ended.code, ended.json["verdict"]) == (0, "stopped")
    other = house.type("wait", "--json", "--until=finished")
    assert (other.code, other.json["exit_code"]) == (5, 5)


def test_of_a_box_that_nobody_holds(house: House) -> None:
    said = house.type("unlock", "--json")
    assert (said.code, said.json["outcome"]) == (0, "free")


def test_of_the_embedded_box(house: House) -> None:
    model = house.base / "sandbox/models" / sandbox_tasks.MODEL
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    sums = {"config.json": hashlib.sha256(b"{}").hexdigest()}
    (model / sandbox_tasks.CHECKSUMS).write_text(json.dumps({"files": sums}))
    assert house.type("sandbox.model", "--json").json["outcome"] == "unchanged"
    try:
        down = house.type("sandbox.down", "--json")
        assert (down.code, down.json["was_up"]) == (0, True)
        seen = house.type("sandbox.status", "--json")
        assert (seen.code, seen.json["server_alive"], seen.json["containers"]) == (5, False, {"200": True})
    finally:
        up = house.type("sandbox.up", "--json")
    assert (up.code, up.json["vmid"]) == (0, 200)
    assert house.type("sandbox.status", "--json").json["models"] == [sandbox_tasks.MODEL]
