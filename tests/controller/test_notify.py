"""Which verdicts are told, in what words, by whom; and that no address is ever repeated."""

from __future__ import annotations

import ast
import copy
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import notify_program, notify_send, notify_watch
from controller.console import Console
from controller.errors import PreflightFailed, Usage
from controller.inventory import PROJECT, Box
from controller.notify_rules import END_S, REARM_S, SETTLE_S, Changes, message
from controller.verdict import EXIT_CODES, Verdict, judge
from tests.inbox import Inbox, open_inbox

WHEN = ["crashed", "stalled", "degraded", "finished"]
SCREENS = PROJECT / "tests" / "golden" / "screens"
SECRET = "planted-token-19c"


def case(name: str) -> dict[str, Any]:
    return dict(json.loads((SCREENS / f"{name}.json").read_text("utf-8"))["snapshot"])


def told(changes: Changes, *looks: tuple[str, float], causes: tuple[str, ...] = ()) -> list[str]:
    """The words that are told of a sequence of `(word, at)`."""
    verdicts = [(Verdict(word, "", causes=causes), at) for word, at in looks]
    return [verdict.word for verdict, at in verdicts if changes.take(verdict, None, at)]


def test_each_trouble_is_told_once() -> None:
    looks = [("healthy", 0.0), ("stalled", 10), ("stalled", 20), ("stalled", 4000), ("crashed", 4010)]
    assert told(Changes(WHEN, "starting"), *looks, ("crashed", 4020)) == ["stalled", "crashed"]


def test_degraded_must_have_held_for_a_minute() -> None:
    brief = [("degraded", 0.0), ("degraded", SETTLE_S - 1), ("healthy", SETTLE_S)]
    changes = Changes(WHEN, "healthy")
    assert told(changes, *brief) == []
    assert told(changes, ("degraded", 100), ("degraded", 100 + SETTLE_S)) == ["degraded"]


def test_flapping_is_no_storm_and_a_lasting_recovery_arms_anew() -> None:
    changes = Changes(WHEN, "healthy")
    flapping = [(word, 100.0 * n) for n in range(50) for word in ("stalled", "healthy")]
    assert told(changes, *flapping) == ["stalled"]
    assert told(changes, ("healthy", 6000), ("healthy", 6000 + REARM_S), ("stalled", 6700)) == ["stalled"]


def test_only_the_words_that_are_wished_for() -> None:
    looks = [("degraded", 0.0), ("degraded", 100), ("stalled", 110), ("finished", 200)]
    assert told(Changes(["finished"], "starting"), *looks) == ["finished"]


def test_what_was_so_when_the_watch_began_is_no_news() -> None:
    looks = [("stalled", 0.0), ("stalled", 50), ("crashed", 60)]
    assert told(Changes(WHEN, "stalled"), *looks) == ["crashed"]


def test_a_crash_that_is_tried_again_is_told_at_once() -> None:
    assert told(Changes(WHEN, "healthy"), ("degraded", 0.0), causes=("restarting",)) == ["degraded"]


def test_an_end_waits_for_the_supervisors_word_on_it() -> None:
    """Between the trainer's death and exit.json a look says no more than `vanished`."""
    snapshot = copy.deepcopy(case("healthy"))
    run, changes = snapshot["run"], Changes(WHEN, "healthy")
    run["processes"] = [each for each in run["processes"] if each["role"] == "supervisor"]
    vanished = judge(snapshot)
    assert vanished.word == "crashed" and run["processes"]
    assert not changes.take(vanished, snapshot, 0.0)
    assert not changes.take(vanished, snapshot, END_S - 1)
    run["exit"] = {"reason": "crashed", "signal": "SIGKILL", "code": 137, "at": snapshot["now"]}
    assert changes.take(judge(snapshot), snapshot, END_S - 0.5)


@pytest.mark.parametrize("path", sorted(SCREENS.glob("*.json")), ids=lambda path: path.stem)
def test_every_recorded_verdict_makes_a_message(path: Path) -> None:
    recorded = json.loads(path.read_text("utf-8"))
    snapshot = recorded["snapshot"]
    verdict = judge(snapshot, gpus=recorded.get("gpus"))
    made = message("lab/200", verdict, snapshot)
    assert verdict.word.upper() in made["title"] and made["title"].startswith("lab/200  ")
    assert made["body"].split("\n")[-1].startswith("next  ")
    assert len(made["body"].split("\n")) <= 3


def test_a_message_says_the_word_the_first_reason_and_the_mend(golden: Any) -> None:
    snapshot = case("stalled-with-a-hung-thread")
    made = message("lab/200", judge(snapshot), snapshot)
    golden("screens/notify-message.txt", f"{made['title']}\n{made['body']}")


# -- the program that travels ------------------------------------------------------------------------------


def test_the_program_holds_what_it_imports_and_reads_as_an_older_python() -> None:
    text = notify_program.text()
    sources = ast.literal_eval(text.splitlines()[0].removeprefix("SOURCES = "))
    assert {
        "agent.notifier",
        "agent.snapshot",
        "controller.verdict",
        "controller.notify_send",
    } <= sources.keys()
    assert not {"controller.call", "controller.inventory", "agent.main"} & sources.keys()
    for name, source in sources.items():
        ast.parse(source, name, feature_version=notify_program.LEAST_PYTHON)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "agent",
                "controller",
            ):
                whole = node.module in ("agent", "controller")
                wanted = [f"{node.module}.{each.name}" for each in node.names] if whole else [node.module]
                assert set(wanted) <= sources.keys(), f"{name} imports {wanted}"
    assert len(notify_program.packed()) < 80_000, "it travels with every start"


def test_the_program_imports_nothing_that_an_environment_may_lack(tmp_path: Path) -> None:
    """An interpreter without any package: only to the point where it wants its line on stdin."""
    path = tmp_path / "notifier.py"
    path.write_text(notify_program.text())
    argv = ["/usr/bin/python3", "-I", "-S", str(path), "agent.notifier", str(tmp_path)]
    done = subprocess.run(argv, input="not JSON\n", capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("json.decoder.JSONDecodeError"), done.stderr


# -- sending -----------------------------------------------------------------------------------------------

WHAT = {"title": "t", "body": "b", "type": "failure"}


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with open_inbox() as made:
        yield made


def test_a_webhook_gets_what_apprise_would_send(inbox: Inbox) -> None:
    pytest.importorskip("apprise")
    plain = f"json://ana:pass%40word@{inbox.host}/hook"
    by_apprise = f"{plain}/?method=post"  # a parameter is what only apprise understands
    assert notify_send.send([plain, by_apprise], WHAT, pauses=()) == []
    ours, theirs = inbox.got
    assert ours["path"] == theirs["path"].rstrip("/") == "/hook"
    for each in (ours, theirs):
        each["headers"] = each["headers"]["Authorization"]
        del each["path"]
    assert ours == theirs


def test_what_is_no_web_server_is_a_failure_like_others(capfd: Any) -> None:
    def speak() -> None:
        with listener, listener.accept()[0] as peer:
            peer.recv(1 << 16)
            peer.sendall(b"220 mail.example.org\r\n")

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=speak, daemon=True).start()
    url = f"json://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
    assert notify_send.send([url], WHAT, pauses=()) == ["address 1 (json://…): BadStatusLine"]
    assert notify_send.send([f"json://127.0.0.1:9/a b{SECRET}"], WHAT, pauses=()) == [
        "address 1 (json://…): InvalidURL"
    ]
    assert SECRET not in "".join(capfd.readouterr())


def test_failures_are_told_without_the_address(inbox: Inbox, capfd: Any) -> None:
    pytest.importorskip("apprise")
    urls = [
        f"json://{inbox.host}/gone/{SECRET}",
        f"json://127.0.0.1:9/{SECRET}",
        f"json://{SECRET}.invalid/",
        f"nosuch://{SECRET}",
        f"json://{inbox.host}/gone/{SECRET}?format=text",
        f"json://[{SECRET}/",
    ]
    failures = notify_send.send(urls, WHAT, pauses=(0.0,))
    assert failures == [
        "address 1 (json://…): answered 404",
        "address 2 (json://…): Connection refused",
        "address 3 (json://…): its name is not known from here",
        "address 4 (nosuch://…): apprise does not know such an address",
        "address 5 (json://…): not delivered",
        "address 6 (json://…): not an address",
    ]
    assert inbox.posts == 4, "the two that answered were asked twice"
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err


# -- watch --notify ----------------------------------------------------------------------------------------


def a_box(monkeypatch: pytest.MonkeyPatch, url: str) -> Box:
    monkeypatch.setenv("NOTIFY_HERE", url)
    notify: Any = {"urls": ["env:NOTIFY_HERE"]}
    from controller.inventory import Notify

    return Box(name="lab", host="h", vmid=200, recipe="r", notify=Notify(**notify))


def crashed_of(snapshot: dict[str, Any]) -> dict[str, Any]:
    snapshot = copy.deepcopy(snapshot)
    snapshot["run"]["exit"] = {"reason": "crashed", "signal": "SIGKILL", "code": 137, "at": snapshot["now"]}
    return snapshot


def watch(teller: notify_watch.Teller, *snapshots: dict[str, Any]) -> dict[str, Any]:
    for each in snapshots:
        teller.take(judge(each), each)
    teller.finish()
    return dict(teller.report(Console()))


def test_the_workstation_tells_of_a_change(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = case("healthy")
    box = a_box(monkeypatch, f"json://{inbox.host}/")
    assert watch(notify_watch.Teller(box), healthy, healthy, crashed_of(healthy)) == {
        "sent": ["crashed"],
        "failed": [],
    }
    assert inbox.titles[0].endswith("CRASHED")
    assert watch(notify_watch.Teller(box), crashed_of(healthy))["sent"] == [], "it was so before"


def test_a_secret_that_a_reason_quotes_does_not_leave(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_HERE", SECRET)
    box = a_box(monkeypatch, f"json://{inbox.host}/")
    box = box.replace(secrets={"A": "env:TOKEN_HERE", "B": "env:NOT_THERE_4"})
    healthy = case("healthy")
    end = crashed_of(healthy)
    end["run"]["exit"] |= {"signal": None, "code": 1}
    end["run"]["log"]["traceback"] = ["Traceback (most recent call last):", f"OSError: 401 for {SECRET}"]
    watch(notify_watch.Teller(box), healthy, end)
    assert "OSError: 401 for …" in inbox.got[0]["message"]


def test_what_the_runs_own_notifier_has_told_is_not_told_again(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, healthy = a_box(monkeypatch, f"json://{inbox.host}/"), case("healthy")
    healthy["run"]["processes"].append({"role": "notifier", "pid": 9, "state": "S"})
    end = crashed_of(healthy)
    last = copy.deepcopy(end)
    last["run"]["notify"] = {"sent": [{"word": "crashed", "at": end["now"]}], "failed": None}
    assert watch(notify_watch.Teller(box), healthy, end, last)["sent"] == []
    assert inbox.got == []
    last["run"]["notify"] = {"sent": [], "failed": {"word": "crashed", "at": 0.0, "texts": ["no way out"]}}
    assert watch(notify_watch.Teller(box), healthy, end, last)["sent"] == ["crashed"]


def test_what_cannot_work_is_said_before_anything_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Usage, match="box 'lab' names no address to notify"):
        notify_watch.Teller(Box(name="lab", host="h", vmid=200, recipe="r"))
    box = a_box(monkeypatch, f"slack://{SECRET}")
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(
        PreflightFailed, match=r"address 1 \(slack://…\): needs apprise, which is not installed"
    ) as caught:
        notify_watch.Teller(box)
    assert SECRET not in caught.value.message + caught.value.hint
    monkeypatch.undo()
    pytest.importorskip("apprise")
    with pytest.raises(PreflightFailed, match=r"\(slak://…\): apprise does not know such an address"):
        notify_watch.Teller(a_box(monkeypatch, f"slak://{SECRET}"))
    monkeypatch.setenv("NOTIFY_HERE", SECRET)
    with pytest.raises(PreflightFailed, match="address 1 of box 'lab' is no address") as caught:
        notify_watch.Teller(box)
    assert SECRET not in caught.value.message + caught.value.hint
    monkeypatch.delenv("NOTIFY_HERE")
    with pytest.raises(PreflightFailed, match="address 1 of box 'lab': the environment variable NOTIFY_HERE"):
        notify_watch.Teller(box)


def test_status_says_what_is_wrong_with_the_notifier() -> None:
    snapshot = case("healthy")
    run = snapshot["run"]
    run["record"]["notify"] = {"when": WHEN, "addresses": 1}
    gone = ("the run's notifier is gone: nobody tells of this run any more",)
    assert judge(snapshot).reasons == gone
    run["notify"] = {"pid": 9, "when": WHEN, "sent": [], "failed": None}
    assert judge(snapshot).reasons == gone
    run["processes"].append({"role": "notifier", "pid": 9, "state": "S"})
    assert judge(snapshot).reasons == ()
    texts = ["address 1 (json://…): Connection refused"]
    run["notify"]["failed"] = {"word": "degraded", "at": snapshot["now"], "texts": texts}
    assert texts[0] not in message("lab/200", judge(snapshot), snapshot)["body"]
    assert judge(snapshot).reasons == (f"a message did not get out: {texts[0]}",)
    run["processes"], run["exit"] = (
        [],
        {"reason": "finished", "code": 0, "signal": None, "at": snapshot["now"]},
    )
    assert judge(snapshot).reasons == (f"a message did not get out: {texts[0]}",)


def test_all_words_that_may_be_wished_for_are_verdicts() -> None:
    from controller.inventory import Notify

    assert set(Notify.when) <= EXIT_CODES.keys()
