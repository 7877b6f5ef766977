"""Whole commands with a planted secret, looked for everywhere; and messages with nobody at the desk."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import embedded, sandbox
from tests.faults.house import House, open_house
from tests.faults.table import fault
from tests.inbox import Inbox, open_inbox

TOKEN, HOOK = f"planted-token-{os.getpid()}", f"planted-hook-{os.getpid()}"
WORDS = (TOKEN.encode(), HOOK.encode())
LONG = ("--set", "steps=100000")


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as made:
        assert made.type("deploy").code == 0
        yield made


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with open_inbox() as made:
        yield made


@pytest.fixture
def desk(house: House, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A box with a token from a file and an address from the environment; what ran is stopped afterwards."""
    token = house.base / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    monkeypatch.setenv("TELL_ME", f"json://{inbox.host}/{HOOK}")
    house.box("lab", secrets={"HF_TOKEN": f"file:{token}"}, notify={"urls": ["env:TELL_ME"]})
    yield house
    house.settle()


def processes_with(name: str) -> list[tuple[str, bytes]]:
    """(file, command) of every process whose `environ` or `cmdline` holds a planted word."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            data = (entry / name).read_bytes() if entry.name.isdigit() else b""
            if any(word in data for word in WORDS):
                found.append((str(entry / name), (entry / "cmdline").read_bytes()))
        except OSError:
            continue
    return found


def files_with(*folders: Path) -> list[str]:
    found = []
    for folder, _, names in itertools.chain.from_iterable(map(os.walk, folders)):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # one that comes and goes
                if path.is_file() and not path.is_symlink():
                    found += [str(path)] * any(word in path.read_bytes() for word in WORDS)
    return found


def trainer(house: House, run: str) -> int:
    [pid] = [pid for pid in house.alive()[run] if b"-m\0trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def gone(house: House, run: str) -> None:
    house.wait_for(lambda: run not in house.alive(), "all processes of the run are gone", 120)


def test_a_planted_secret_is_in_the_trainers_environment_and_nowhere_else(desk: House, inbox: Inbox) -> None:
    seen: set[tuple[str, bytes]] = set()
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            seen.update(processes_with("cmdline"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    said = [desk.type("restart", *LONG, "--json")]
    over.set()
    sampler.join()
    assert seen == set()
    run = said[0].json["start"]["run"]
    pid = trainer(desk, run)
    assert f"HF_TOKEN={TOKEN}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ours = f"/proc/{os.getpid()}/environ"
    assert {path for path, _ in processes_with("environ")} - {ours} == {f"/proc/{pid}/environ"}

    asked = [["status"], ["logs"], ["runs"], ["runs.show", run], ["boxes"], ["attach", "--print"]]
    said += [desk.type(*words, *more) for words in asked for more in ((), ("--json",))]
    said += [desk.type("-R", "restart"), desk.type("exec", "tmux -L pctrun show-environment -g", "--json")]
    shown = desk.type("runs.show", run).out
    assert "secrets    HF_TOKEN (only their names are kept)" in shown
    assert "notify     of crashed, stalled, degraded, finished, from beside the run" in shown
    os.kill(pid, signal.SIGKILL)
    gone(desk, run)
    said += [desk.type("status", "--json"), desk.type("restart", "--set", "stepz=5", "--json")]
    assert TOKEN in Path(desk.base / "token").read_text()
    for each in said:
        assert TOKEN not in each.out + each.err and HOOK not in each.out + each.err, each
    assert files_with(desk.ct, desk.base / "state", desk.base / "sandbox" / "host") == []
    assert files_with(desk.base) == [str(desk.base / "token")]
    assert inbox.titles == [f"lab/200  {run}  CRASHED"]


@fault(
    "trainer killed while the workstation is away",
    promised="whoever the box names is told all the same, once",
    seen="one message `CRASHED` with `killed by SIGKILL at step`; the next look says `crashed`",
    part="way",
)
def test_it_tells_while_nobody_is_at_the_desk(desk: House, inbox: Inbox) -> None:
    """The connection, the server that served it and every process of this side are gone."""
    run = desk.type("restart", *LONG, "--json").json["start"]["run"]
    pid = trainer(desk, run)
    embedded.down()
    os.kill(pid, signal.SIGKILL)
    gone(desk, run)
    assert inbox.titles == [f"lab/200  {run}  CRASHED"]
    assert inbox.got[0]["message"].startswith("killed by SIGKILL at step")
    embedded.up(revive=True)
    assert desk.status()["verdict"] == "crashed"


def test_a_finished_run_is_one_message_also_when_it_is_watched(desk: House, inbox: Inbox) -> None:
    desk.type("restart", "--set", "steps=60", "--from-scratch")
    watched = desk.type("watch", "--notify", "--json").json
    assert (watched["verdict"], watched["notify"]) == ("finished", {"sent": [], "failed": []})
    assert inbox.titles == [f"lab/200  {watched['run']}  FINISHED"]


def test_the_workstation_tells_where_the_box_is_not_to(desk: House, inbox: Inbox) -> None:
    desk.box("lab", notify={"urls": ["env:TELL_ME"], "when": ["finished"], "by": "watch"})
    run = desk.type("restart", "--set", "steps=300", "--from-scratch", "--json").json["start"]["run"]
    pid = trainer(desk, run)
    os.kill(pid, signal.SIGSTOP)  # its end is news for whoever watched before it
    assert not any("notifier" in Path(f"/proc/{pid}/cmdline").read_text() for pid in desk.alive()[run])
    before = len(sandbox.pct_calls())
    with desk.when(lambda: len(sandbox.pct_calls()) > before, lambda: os.kill(pid, signal.SIGCONT)):
        watched = desk.type("watch", "--notify", "--json").json
    assert watched["notify"] == {"sent": ["finished"], "failed": []}
    assert inbox.titles == [f"lab/200  {run}  FINISHED"]


def test_what_is_missing_is_said_before_anything_is_touched(desk: House) -> None:
    run = desk.type("restart", *LONG, "--json").json["start"]["run"]
    desk.box("lab", secrets={"HF_TOKEN": "env:NOT_THERE_9", "OTHER": "file:/nowhere/x"})
    said = desk.type("restart")
    assert said.code == 9
    assert said.err.splitlines() == [
        "error: secret HF_TOKEN of box 'lab': the environment variable NOT_THERE_9 is not set",
        "  | secret OTHER of box 'lab': /nowhere/x cannot be read: No such file or directory",
        "hint: export NOT_THERE_9=…",
    ]
    assert desk.status()["snapshot"]["run"]["id"] == run and run in desk.alive()
    desk.box("lab", notify={"urls": ["env:NOT_THERE_9"]})
    said = desk.type("watch", "--notify")
    assert said.code == 9 and "address 1 of box 'lab': the environment variable NOT_THERE_9" in said.err
    desk.box("lab")
    said = desk.type("watch", "--notify")
    assert said.code == 1 and "box 'lab' names no address to notify" in said.err
