"""Several boxes in one command: a line each, in order, and nobody waits for the one that does not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from controller import cli, inventory, many, render, sandbox, verdict
from controller.console import Console
from controller.errors import Unreachable
from controller.inventory import Box
from controller.outcome import Outcome

PROJECT = Path(__file__).resolve().parents[2]
SCREENS = PROJECT / "tests/golden/screens"
INVENTORY = """
default: one
boxes:
  one: &one
    sandbox: true
    vmid: 200
    recipe: smollm2-135m
    roots: {opt: /opt/first, lib: /var/lib/first, cache: /var/cache/first, run: /run/first}
  second:
    <<: *one
    roots: {opt: /opt/second, lib: /var/lib/second, cache: /var/cache/second, run: /run/second}
  mute: {host: 127.0.0.1, port: PORT, vmid: 200, recipe: smollm2-135m}
  gone: {host: 127.0.0.1, port: 1, vmid: 200, recipe: smollm2-135m}
"""


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of a host that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def start(tmp_path: Path, mute: int, embedded: sandbox.Endpoint) -> Callable[..., subprocess.Popen[str]]:
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY.replace("PORT", str(mute)))

    def run(*words: str, **given: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PCTRUN_INVENTORY": str(path)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given}
        command = [sys.executable, "-m", "invoke", *words]
        return subprocess.Popen(command, env=environment, cwd=PROJECT, text=True, **pipes)

    return run


def boxes(*names: str) -> list[Box]:
    return [Box(name=name, host="h", vmid=200, recipe="r") for name in names]


def test_a_box_that_does_not_answer_holds_up_nobody(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("status", "--box", "one", "--box", "second", "--box", "mute", "--box", "gone")
    assert process.stdout is not None
    for name in ("one", "second"):
        line = process.stdout.readline()
        assert line.startswith(f"{name}/200") and "NOT-RUNNING" in line
    assert process.poll() is None, "the mute one was to be waited for"
    process.kill()
    process.communicate()


def test_status_of_all_is_a_line_each_and_the_worst_code(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("status", "--box", "gone", "--box", "one", "--box", "second")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 7, err
    *lines, last = out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["gone/200", "UNREACHABLE"],
        ["one/200", "NOT-RUNNING"],
        ["second/200", "NOT-RUNNING"],
    ]
    assert {line.index(line.split()[1]) for line in lines} == {len("second/200  ")}
    assert last == "next  invoke status --box NAME shows the whole"


def test_all_of_an_inventory_of_one_box_is_a_line_too(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text("default: gone\nboxes:\n  gone: {host: 127.0.0.1, port: 1, vmid: 200, recipe: r}\n")
    environment = {**os.environ, "PCTRUN_INVENTORY": str(path), "PCTRUN_STATE": str(tmp_path)}
    command = [sys.executable, "-m", "invoke", "status", "--all"]
    done = subprocess.run(command, env=environment, cwd=PROJECT, text=True, capture_output=True, timeout=300)
    line, last = done.stdout.splitlines()
    assert done.returncode == 7 and line.startswith("gone/200  UNREACHABLE  nothing is known about the run: ")
    assert last == "next  invoke status --box NAME shows the whole"


def test_json_of_several_keeps_the_schema_and_the_order(start: Callable[..., subprocess.Popen[str]]) -> None:
    out, _ = start("status", "--box", "second", "--box", "gone", "--box", "one", "--json").communicate(
        timeout=300
    )
    document = json.loads(out)
    jsonschema.validate(document, json.loads((PROJECT / "docs/schema/status.json").read_text("utf-8")))
    assert [(each["box"], each["exit_code"]) for each in document["boxes"]] == [
        ("second", 5),
        ("gone", 7),
        ("one", 5),
    ]
    assert document["exit_code"] == 7


def test_each_refusal_names_its_box(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("restart", "--box", "one", "--box", "second")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (9, "")
    told = [line for line in err.splitlines() if "error:" in line]
    assert told == ["one: error: no release in /opt/first", "second: error: no release in /opt/second"]


def test_a_reader_that_leaves_costs_no_box_its_turn(start: Callable[..., subprocess.Popen[str]]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("status", "--box", "one", "--box", "gone", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (7, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "--all", "--box", "one"], "error: --all and --box exclude each other"),
        (["watch", "--all"], "error: watch takes one box"),
        (["logs", "--follow", "--all"], "error: --follow takes one box"),
    ],
)
def test_what_makes_no_sense_for_several(
    start: Callable[..., subprocess.Popen[str]], words: list[str], said: str
) -> None:
    process = start(*words)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and err.splitlines()[0] == said


def test_all_are_those_of_the_inventory_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY.replace("PORT", "22"))
    found = inventory.load(path)
    assert [box.name for box in found.pick([], every=True)] == ["one", "second", "mute", "gone"]
    assert [box.name for box in found.pick([])] == ["one"]


def test_results_come_in_order_and_as_soon_as_they_can(capsys: pytest.CaptureFixture[str]) -> None:
    go_on = threading.Event()

    def act(box: Box, console: Console) -> Outcome:
        if box.name == "slow":
            assert go_on.wait(60)
        if box.name == "away":
            raise Unreachable("no way")
        return Outcome(text=box.name)

    results = many.over(boxes("quick", "slow", "away"), act, parallel=True)
    assert next(results)[1] == Outcome(text="quick")
    threading.Timer(many.PATIENCE_S + 2.5, go_on.set).start()
    began = time.monotonic()
    (slow, first), (away, second) = results
    assert time.monotonic() - began > many.PATIENCE_S
    assert (slow.name, away.name, first) == ("slow", "away", Outcome(text="slow"))
    assert isinstance(second, Unreachable)
    assert capsys.readouterr().err == "waiting for slow\n"


def test_a_defect_on_one_box_lets_the_others_come_to_their_end() -> None:
    done = []

    def act(box: Box, console: Console) -> Outcome:
        if box.name == "bad":
            raise RuntimeError("a defect")
        time.sleep(0.3)
        done.append(box.name)
        return Outcome()

    with pytest.raises(RuntimeError, match="a defect"):
        list(many.over(boxes("bad", "good"), act, parallel=True))
    assert done == ["good"]


def test_the_screen_of_several(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded verdicts, then two operations that say a line or two, then tables."""
    cases = {
        "berlin": "healthy-restarted",
        "oslo": "degraded-restarting",
        "rome": "crashed-not-tried-again",
        "a-long-name": "unreachable-last-seen",
    }
    results: list[tuple[Box, many.Result]] = []
    for name, case in cases.items():
        [box], told = boxes(name), json.loads((SCREENS / f"{case}.json").read_text("utf-8"))
        known = {key: told[key] for key in ("why", "mend", "last") if key in told}
        found = verdict.judge(told["snapshot"], **known)
        line = render.among_others(box.label, found, told["snapshot"])
        results.append((box, Outcome({}, "a screen\nof two lines", found.exit_code, found.word, line)))
    code = cli._report("status", [box for box, _ in results], results, several=True, as_json=False)
    assert code == 4
    lines = ["stopped r-0001 at step 40", "started r-0002 from r-0001 step 40"]
    short = [(box, Outcome({}, "\n".join(lines))) for box in boxes("berlin", "oslo")]
    table = [
        (box, Outcome({}, "  run  verdict\n  r-1  HEALTHY\nnext  invoke runs"))
        for box in boxes("berlin", "oslo")
    ]
    for task, told in (("restart", short), ("runs", table)):
        print(f"-- {task}")
        assert cli._report(task, [box for box, _ in told], told, several=True, as_json=False) == 0
    golden("screens/many-boxes.txt", capsys.readouterr().out.rstrip("\n"))
