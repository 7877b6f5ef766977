"""Messages of a run: to a real HTTP server, from a real process beside real trainers that really die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import procs
from controller import notify_program
from tests.faults.table import fault
from tests.inbox import Inbox, open_inbox

LONG = {"steps": 100000, "step_s": 0.02}
SHORT = {"steps": 20, "step_s": 0.02}
WHEN = ["crashed", "stalled", "degraded", "finished"]
TOKEN = "planted-token-4b"
PATH = "planted-path-88c1"


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with open_inbox() as made:
        yield made


def address(inbox: Inbox) -> str:
    return f"json://{inbox.host}/{PATH}"


def wish(*urls: str, when: list[str] = WHEN, look_s: float = 0.3) -> dict[str, Any]:
    return {
        "notify": {
            "urls": list(urls),
            "when": when,
            "box": "lab/200",
            "gpus": None,
            "vmid": 321,
            "look_s": look_s,
            "least_python": notify_program.LEAST_PYTHON,
            "wants_apprise": [],
            "program": notify_program.packed(),
        }
    }


def role(box: Any, run: str, name: str) -> procs.Proc:
    return box.wait_for(
        lambda: getattr(procs.roles(box.scope(run), None), name), f"a {name} among {box.scope(run)}"
    )


def ended(box: Any, run: str) -> None:
    box.wait_for(lambda: not box.scope(run), "all processes of the run are gone")


def test_a_killed_trainer_is_one_message_and_then_nothing_is_left(ready: Any, inbox: Inbox) -> None:
    ready.private = wish(address(inbox))
    run = ready.start(recipe=LONG).result["run"]
    notifier = role(ready, run, "notifier")
    ready.wait_for(lambda: os.getpriority(os.PRIO_PROCESS, notifier.pid) == 19, "the lowest priority")
    shown = ready.call("snapshot").result["run"]
    assert {each["role"] for each in shown["processes"]} == {"supervisor", "trainer", "notifier"}
    os.kill(role(ready, run, "trainer").pid, signal.SIGKILL)
    ended(ready, run)
    [message] = inbox.got
    assert message["title"] == f"lab/200  {run}  CRASHED"
    assert message["path"] == f"/{PATH}" and message["type"] == "failure"
    first, *rest = message["message"].split("\n")
    assert first.startswith("killed by SIGKILL at step")
    assert rest[0].startswith("why   ") and rest[-1].startswith("next  on the Proxmox host")
    told = ready.file(run, "notify.json")
    assert [each["word"] for each in told["sent"]] == ["crashed"] and told["failed"] is None
    assert ready.file(run, "run.json")["notify"] == {"when": WHEN, "addresses": 1}
    for path in ready.base.rglob("*"):
        assert not path.is_file() or PATH.encode() not in path.read_bytes(), path


def test_what_to_do_on_the_host_names_the_container(ready: Any, inbox: Inbox) -> None:
    ready.private = wish(address(inbox))
    deaths = [{"at": 2, "of": "DefaultCPUAllocator: not enough memory"}]
    run = ready.start(recipe={**LONG, "deaths": deaths}).result["run"]
    ended(ready, run)
    [message] = inbox.got
    assert "pct set 321 -memory" in message["message"]


def test_a_finished_run_is_one_message(ready: Any, inbox: Inbox) -> None:
    ready.private = wish(address(inbox))
    run = ready.start(recipe=SHORT).result["run"]
    ended(ready, run)
    assert inbox.titles == [f"lab/200  {run}  FINISHED"]


def test_a_crash_that_is_tried_again_is_told_and_the_notifier_lives_on(ready: Any, inbox: Inbox) -> None:
    ready.private = {**wish(address(inbox)), "environment": {"HF_TOKEN": TOKEN}}
    run = ready.start(recipe={**LONG, "save_every": 5}, auto_restart=1, backoff_s=5.0).result["run"]
    notifier, first = role(ready, run, "notifier"), role(ready, run, "trainer")
    supervisor = role(ready, run, "supervisor")
    os.kill(first.pid, signal.SIGKILL)
    ready.wait_for((ready.run_dir(run) / "attempts.json").exists, "the pause")
    os.kill(supervisor.pid, signal.SIGSTOP)  # it lasts as long as the notifier, the last in priority, needs
    ready.wait_for(lambda: inbox.got, "a message")
    os.kill(supervisor.pid, signal.SIGCONT)
    assert inbox.titles == [f"lab/200  {run}  DEGRADED"]
    assert "starts again" in inbox.got[0]["message"]
    second = ready.wait_for(
        lambda: next((p for p in ready.scope(run) if "trainer" in p.argv and p.pid != first.pid), None),
        "another attempt",
    )
    assert procs.look(notifier.pid) is not None
    os.kill(second.pid, signal.SIGKILL)
    ended(ready, run)
    assert inbox.titles[1:] == [f"lab/200  {run}  CRASHED"]


def test_an_address_that_nobody_knows_is_said_by_the_first_status(ready: Any, inbox: Inbox) -> None:
    pytest.importorskip("apprise")
    ready.private = wish(f"slak://{PATH}", address(inbox))
    run = ready.start(recipe=LONG).result["run"]
    told = ready.wait_for(
        lambda: (ready.call("snapshot").result["run"]["notify"] or {}).get("failed"), "what is wrong"
    )
    assert told["texts"] == ["address 1 (slak://…): apprise does not know such an address"]
    assert role(ready, run, "notifier")


def test_a_secret_in_the_trainers_last_words_does_not_leave(ready: Any, inbox: Inbox) -> None:
    ready.private = {**wish(address(inbox)), "environment": {"HF_TOKEN": "the stand-in"}}
    answer = ready.start("die")
    run = answer.error["run"]
    ended(ready, run)
    [message] = inbox.got
    assert "ValueError: … dies as it was told" in message["message"]


def test_a_stop_is_no_news_and_no_later_for_the_notifier(ready: Any, inbox: Inbox) -> None:
    ready.private = wish(address(inbox))
    ready.start(recipe=LONG)
    began = time.monotonic()
    answer = ready.call("stop").result
    assert (answer["outcome"], answer["killed"], answer["survivors"]) == ("stopped", [], [])
    assert time.monotonic() - began < 25, "30 s are what an end that is news may take"
    assert inbox.got == []


@fault(
    "nvidia-smi hangs under the notifier, the run is stopped",
    promised="what a look starts is none of the run's: no survivor, nothing of it killed",
    seen="nothing killed, no survivors",
    part="process",
)
def test_what_its_looks_start_is_no_part_of_the_run(ready: Any, inbox: Inbox) -> None:
    """A hung nvidia-smi would otherwise be a survivor of every stop."""
    folder = ready.base / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n[ -e {folder}/hang ] && exec sleep 600\n")
    (folder / "nvidia-smi").chmod(0o755)
    ready.environment["PATH"] = f"{folder}:{ready.environment['PATH']}"
    ready.private = wish(address(inbox))
    run = ready.start(recipe=LONG).result["run"]
    notifier = role(ready, run, "notifier")
    (folder / "hang").touch()
    child = ready.wait_for(
        lambda: next(
            (
                p
                for p in map(procs.look, procs.pids())
                if p and p.argv[:1] == ("sleep",) and p.ppid == notifier.pid
            ),
            None,
        ),
        "a look's child",
    )
    assert procs.RUN_DIR not in procs.environment(child.pid)
    answer = ready.call("stop").result
    assert (answer["killed"], answer["survivors"]) == ([], [])
    os.kill(child.pid, signal.SIGKILL)


def test_a_run_without_its_supervisor_is_still_watched(ready: Any, inbox: Inbox) -> None:
    ready.private = wish(address(inbox))
    run = ready.start(recipe=LONG).result["run"]
    notifier, trainer = role(ready, run, "notifier"), role(ready, run, "trainer")
    os.kill(role(ready, run, "supervisor").pid, signal.SIGKILL)
    time.sleep(1.0)
    assert procs.look(notifier.pid) and inbox.got == []
    os.kill(trainer.pid, signal.SIGKILL)
    ended(ready, run)
    assert inbox.titles == [f"lab/200  {run}  CRASHED"]


@fault(
    "no way out of the container for messages",
    promised="the run ends as it would; three tries, then it is written down, without the address",
    seen="`address 1 (json://…): Connection refused` in notify.json; another address has the message",
    part="way",
)
def test_a_server_that_stumbles_is_asked_again_and_one_that_is_not_there_is_given_up(
    ready: Any, inbox: Inbox
) -> None:
    closed = f"json://127.0.0.1:9/{PATH}"
    inbox.refuse = 1
    ready.private = wish(closed, address(inbox))
    run = ready.start(recipe=SHORT).result["run"]
    ended(ready, run)
    told = ready.file(run, "notify.json")
    assert told["failed"]["texts"] == ["address 1 (json://…): Connection refused"]
    assert (inbox.posts, len(inbox.got)) == (2, 1), "the other address has it, at the second try"
    assert ready.call("snapshot").result["run"]["notify"]["failed"]["word"] == "finished"
    assert ready.file(run, "exit.json")["reason"] == "finished"


@fault(
    "the notifier killed",
    promised="the run goes on; a stop and its checkpoint are as ever; no zombie",
    seen="the steps go on, the stop's outcome is `stopped`",
    part="process",
)
def test_a_notifier_that_dies_leaves_the_run_alone(ready: Any, inbox: Inbox) -> None:
    ready.private = wish(address(inbox))
    run = ready.start(recipe=LONG).result["run"]
    notifier = role(ready, run, "notifier")
    os.kill(notifier.pid, signal.SIGKILL)
    step = ready.file(run, "state.json")["step"]
    ready.wait_for(lambda: not Path(f"/proc/{notifier.pid}").exists(), "no zombie is left")
    ready.wait_for(lambda: ready.file(run, "state.json")["step"] > step + 5, "training goes on")
    assert ready.call("stop").result["outcome"] == "stopped"
    assert inbox.got == []


def test_an_address_that_cannot_be_served_refuses_the_start(ready: Any) -> None:
    ready.private = wish("slack://a/b/c")
    ready.private["notify"]["wants_apprise"] = ["slack"]
    ready.python = "/usr/bin/python3"  # no packages: what a bare environment is
    answer = ready.start()
    assert answer.error["kind"] == "environment"
    assert "slack:// needs apprise" in answer.error["message"] and "by: watch" in answer.error["hint"]
    ready.private["notify"]["least_python"] = [3, 99]
    assert "the notifier needs Python 3.99" in ready.start().error["message"]
    assert not ready.run_dir("r-0001").exists()
