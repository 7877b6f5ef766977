"""`-R` shows what would be sent, and nothing is: no connection, no sandbox."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller import (
    abort,
    attach,
    deploy,
    doctor,
    env_build,
    env_diff,
    env_list,
    env_prune,
    env_use,
    execution,
    fetch,
    links,
    logs,
    options,
    plan,
    plot,
    release,
    restart,
    rollback,
    runs,
    runs_diff,
    runs_pin,
    runs_prune,
    runs_show,
    status,
    tasks,
    typed,
    unlock,
    wait,
    watch,
)
from controller.errors import Usage
from controller.inventory import Box

LAB = Box(name="lab", host="pve1", vmid=201, recipe="qwen", overrides={"steps": 10}, grace_s=300)
SANDBOX = Box(name="sandbox", sandbox=True, vmid=200, recipe="smollm2-135m")

PLANS: dict[str, tuple[Any, Box, dict[str, Any]]] = {
    "deploy": (deploy, SANDBOX, {}),
    "restart": (restart, SANDBOX, {}),
    "restart-all-options": (
        restart,
        LAB,
        {
            "fresh_cache": True,
            "allow_slow_kernels": True,
            "recipe": "other",
            "settings": ["steps=20", "name=a b", "taps=[1, 2]"],
            "from_scratch": True,
            "reason": "new data",
        },
    ),
    "status": (status, LAB, {}),
    "abort": (abort, LAB, {"run_id": "r-0004", "reason": "driver"}),
    "logs": (logs, LAB, {}),
    "logs-follow": (logs, LAB, {"follow": True, "lines": 0, "run_id": "r-0001"}),
    "logs-since": (logs, LAB, {"since": "10m", "grep": "tau"}),
    "exec": (execution, LAB, {"command": "sh -c 'echo $HOME'", "more": ["a b", ""], "with_stdin": True}),
    "attach": (attach, LAB, {}),
    "attach-named": (attach, LAB, {"run_id": "r-0001", "only_print": True}),
    "doctor": (doctor, LAB, {}),
    "doctor-quick": (doctor, LAB, {"quick": True}),
    "fetch": (fetch, LAB, {"run_id": "r-0004", "checkpoint": "best", "out": "drafters"}),
    "watch": (watch, LAB, {"every_s": 5.0}),
    "plot": (plot, LAB, {"runs": "r-0001,r-0002"}),
    "rollback": (rollback, LAB, {}),
    "restart-from": (
        restart,
        LAB,
        {"from_run": "r-0003", "release": "9f31c2", "settings": ["train.lr=1e-4"]},
    ),
    "runs": (runs, LAB, {}),
    "runs-show": (runs_show, LAB, {"run_id": "r-0004"}),
    "runs-diff": (runs_diff, LAB, {"first": "r-0003", "second": "r-0004"}),
    "runs-prune": (runs_prune, LAB, {"keep": 5}),
    "runs-pin": (runs_pin, LAB, {"run_id": "r-0004", "reason": "the paper"}),
    "env-build": (env_build, LAB, {"env": "tiny"}),
    "env-build-wheelhouse": (
        env_build,
        LAB,
        {"env": "tiny", "wheels": "wheels", "source": ["beta==1.0"], "arch": "9.0", "aside": True},
    ),
    "env-list": (env_list, LAB, {}),
    "env-use": (env_use, LAB, {"env": "previous"}),
    "env-diff": (env_diff, LAB, {"first": "previous", "second": "current"}),
    "env-prune": (env_prune, LAB, {"keep": 2}),
    "unlock": (unlock, LAB, {}),
    "wait": (wait, LAB, {"until": "finished", "timeout_s": 60}),
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a plan must not reach for anything")

    monkeypatch.setattr(links, "get", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of(
    name: str,
    golden: Callable[[str, str], None],
    offline: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    if name.startswith("env-build"):
        (tmp_path / "locks").mkdir()
        (tmp_path / "locks" / "tiny.txt").write_text("alpha==1.0\n")
    monkeypatch.setattr(release, "payload_root", lambda: tmp_path)
    operation, box, options = PLANS[name]
    made = operation.plan(box, **options)
    golden(f"plans/{name}.txt", plan.text(made, box))
    narrow = plan.text(made, box, width=80).splitlines()
    assert all(len(line) <= 80 for line in narrow), "a terminal would tear or cut it"


def test_a_plan_is_data_as_well(offline: None) -> None:
    made = plan.as_json(restart.plan(LAB))
    assert made["round_trips"] == "1 pct exec"
    assert made["plan"][0]["verb"] == "restart"
    assert made["plan"][0]["args"]["overrides"] == {"steps": 10}


@pytest.mark.parametrize(
    ("of_the_box", "typed", "times"),
    [(0, None, 0), (0, True, 3), (0, "5", 5), (2, None, 2), (2, True, 2), (2, "0", 0)],
)
def test_how_often_a_crash_is_tried_again(of_the_box: int, typed: str | bool | None, times: int) -> None:
    box = Box(name="lab", host="pve1", vmid=201, recipe="r", auto_restart=of_the_box)
    assert restart.plan(box, auto_restart=typed).steps[0].args["auto_restart"] == times


@pytest.mark.parametrize(("typed", "times"), [(None, None), ("0", 0), ("5", 5)])
def test_a_run_that_is_repeated_keeps_its_restarts_unless_told_otherwise(
    typed: str | None, times: int | None
) -> None:
    box = Box(name="lab", host="pve1", vmid=201, recipe="r", auto_restart=2)
    step = restart.plan(box, from_run="r-0003", auto_restart=typed).steps[0]
    assert step.args["auto_restart"] == times
    assert ("its own --auto-restart" in step.text) == (times is None)


@pytest.mark.parametrize("typed", ["x", "-1", "101", "3.5", ""])
def test_a_wrong_number_of_restarts_is_one_line(typed: str) -> None:
    with pytest.raises(Usage, match="--auto-restart wants a number of 0 to 100"):
        restart.plan(LAB, auto_restart=typed)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-3", 0.001),
        ("a=1.0e-3", 0.001),
        ("a=true", True),
        ("a=x=y", "x=y"),
        ("a=", ""),
        ("a=[1, 2]", [1, 2]),
    ],
)
def test_settings_are_read_as_yaml(text: str, value: object) -> None:
    assert restart.parse_setting(text) == ("a", value)


@pytest.mark.parametrize("text", ["a", "=1", "a=[1", "", "a=2026-01-31", "a=.nan", "a=" + "[" * 5000])
def test_a_broken_setting_is_one_line(text: str) -> None:
    with pytest.raises(Usage, match="--set"):
        restart.parse_setting(text)


def test_an_unknown_verdict_cannot_be_waited_for() -> None:
    with pytest.raises(Usage, match="no verdict is called 'ready'"):
        wait.plan(LAB, until="ready")


def test_nothing_to_execute_is_said_before_anything_is_sent() -> None:
    with pytest.raises(Usage, match="nothing to run"):
        execution.plan(LAB, command=" ")
    with pytest.raises(Usage, match="cannot split"):
        execution.plan(LAB, command="echo 'x")
    with pytest.raises(Usage, match="NUL"):
        execution.plan(LAB, command="echo", more=["\0"])


def test_every_option_that_may_be_repeated_is_looked_at() -> None:
    made = [tasks.namespace[name] for name in tasks.namespace.task_names]
    names = {f"--{each.rstrip('_')}" for task in made for each in task.iterable}
    assert {"--box", "--set", "--source", "--arg"} <= names
    for name in names:
        with pytest.raises(Usage, match=f"{name} wants a value") as caught:
            typed.check(["task", name, "--word"])
        assert f"{name}=--word" in caught.value.hint
    typed.check(["exec", "ls", "--", "--arg", "--word"])


def test_help_tells_of_every_argument_that_may_stand_by_itself() -> None:
    """Invoke's own shows it as an option alone."""
    made = [tasks.namespace[name] for name in tasks.namespace.task_names]
    told = [(task.name, name, task.help[name]) for task in made for name in task.positional]
    assert len(told) >= 10
    assert [each for each in told if f"(may stand without --{each[1]})" not in each[2]] == []


def test_the_options_of_exec_with_a_value_are_those_of_the_parser() -> None:
    """`exec --cwd /opt -- ls` begins with its dashes; a value must not be taken for the command."""
    made = copy.deepcopy(tasks.exec_)
    valued = {f"--{flag}" for each in made.get_arguments() if each.takes_value for flag in each.names}
    assert set(options._valued(made.body)) == valued
