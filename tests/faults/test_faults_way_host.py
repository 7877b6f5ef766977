"""OpenSSH's own server before the container: restarted, with another key, few channels, two operators."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import logins
from controller.endpoint import resolve
from controller.errors import ConnectionLost
from controller.inventory import load
from controller.transport import Link

from .house import House, Started
from .openssh import Sshd
from .table import fault


@pytest.fixture(scope="module")
def server(built: House) -> Iterator[Sshd]:
    made = Sshd(built)
    built.wire.target = made.port
    yield made
    made.kill()


@pytest.fixture
def host(house: House, server: Sshd) -> Iterator[Sshd]:
    """The server with its first key and Debian's limits, before a test and after it."""
    server.kill()
    server.start()
    house.box("lab", host_key=server.host_key)
    yield server
    server.kill()
    server.start()
    house.box("lab", host_key=server.host_key)


@pytest.fixture
def run(house: House, host: Sshd) -> str:
    said = house.type("restart", "--json")
    assert said.code == 0, said
    return str(said.json["start"]["run"])


@fault(
    "sshd restarted in mid-command (its listener alone, as systemd does)",
    promised="a connection that stands is not touched",
    seen="exit 0, the command's `done`; the next command connects to the new one",
)
def test_a_restart_of_the_listener_touches_no_command(house: House, host: Sshd) -> None:
    flag = house.ct / "tmp" / "begun"

    def restart() -> None:
        host.stop()
        host.start()

    with house.when(flag.exists, restart):
        said = house.type("exec", "sh", "--arg=-c", "--arg=touch /tmp/begun; sleep 1; echo done")
    assert (said.code, said.out) == (0, "done\n"), said
    flag.unlink()
    assert house.type("exec", "echo again").out == "again\n"


@fault(
    "sshd and its sessions killed in mid-command",
    promised="the command ends here and in the container; nothing is left of it",
    seen="exit 7, `the connection broke`, `the agent ends the command`; its process is gone",
)
def test_a_host_that_ends_its_sessions_is_a_lost_connection(house: House, host: Sshd) -> None:
    flag = house.ct / "tmp" / "begun"
    with house.when(flag.exists, host.kill):
        said = house.type("exec", "sh", "--arg=-c", "--arg=echo $$ > /tmp/begun; sleep 77")
    host.start()
    assert said.code == 7 and "the connection broke" in said.err and "the agent ends the command" in said.err
    pid = house.wait_for(lambda: flag.read_text().strip(), "the command's process id")
    flag.unlink()
    house.wait_for(lambda: house.type("exec", f"kill -0 {pid}").code != 0, "the command is ended")


@fault(
    "sshd and its sessions killed while logs --follow and watch run",
    promised="both go on by themselves: the log at the same byte, the watch at the same run",
    seen="`following again from byte`, no byte twice or missing; `UNREACHABLE`, then the run's word again",
)
def test_following_and_watching_outlive_a_restart_of_the_host(house: House, host: Sshd, run: str) -> None:
    follower = house.start("logs", "--follow", "--lines=0")
    watcher = house.start("watch", "--every=0.3")
    house.wait_for(lambda: follower.out and watcher.out, "both are at work", 60)
    host.kill()
    house.wait_for(lambda: word(watcher) == "UNREACHABLE", "the watch has seen it")
    host.start()
    house.wait_for(lambda: word(watcher) != "UNREACHABLE", "the watch has looked")
    house.wait_for(lambda: len(sessions(house)) == 2, "both are at work again")
    assert house.type("abort").code == 0
    followed, watched = follower.ended(), watcher.ended()
    assert followed.code == 0 and "following again from byte" in followed.err, followed
    assert followed.out.encode() == (house.runs / run / "train.log").read_bytes()
    words = [line.split()[1] for line in watched.out.splitlines()]
    assert words.count("UNREACHABLE") == words[1:-2].count("UNREACHABLE") > 0, words
    assert (words[-1], watched.code) == ("STOPPED", 5), words


def word(watcher: Started) -> str:
    """The verdict that a watch has told last."""
    return watcher.out.rpartition("\n")[0].splitlines()[-1].split()[1]


def sessions(house: House) -> list[str]:
    """The agents at work in the container."""
    listing = house.pct("exec", "200", "--", "ps", "-eo", "args")
    return [line for line in listing.splitlines() if "-I -c import sys" in line]


@fault(
    "host key changed",
    promised="nothing is sent; both keys and the mend are named, for this port; no command tries again",
    seen="exit 7, `has changed`, `ssh-keygen -R '[127.0.0.1]:`; status: `UNREACHABLE` with the last word",
)
def test_a_changed_host_key_is_refused_with_the_mend(house: House, host: Sshd, run: str) -> None:
    known = house.base / "known_hosts"
    kind, blob, *_ = host.public_key.read_text().split()
    known.write_text(f"[127.0.0.1]:{house.wire.port} {kind} {blob}\n")
    first = host.host_key
    house.box("lab", known_hosts=str(known), host_key=None)
    assert house.type("status").out.count(run) == 1
    host.kill()
    host.start(key="second")
    said = house.type("deploy")
    assert said.code == 7 and "has changed" in said.err
    assert first in said.err and host.host_key in said.err
    assert f"ssh-keygen -R '[127.0.0.1]:{house.wire.port}' -f {known}" in said.err
    seen = house.type("status")
    assert seen.code == 7 and "UNREACHABLE" in seen.out and f"{run} at step" in seen.out
    began = time.monotonic()
    assert house.type("wait", "--until", "finished", "--timeout", "60").code == 7
    assert time.monotonic() - began < 40, "it must not wait for a key that will not come back"
    house.box("lab", host_key=first)
    pinned = house.type("abort")
    assert pinned.code == 7 and "is not the pinned one" in pinned.err
    assert list(house.alive()) == [run]


@fault(
    "host key changed while watch runs",
    promised="the watch ends instead of offering a login to a stranger every few seconds",
    seen="exit 7, `is not the pinned one`; the run goes on",
)
def test_a_watch_does_not_go_on_with_a_stranger(house: House, host: Sshd, run: str) -> None:
    watcher = house.start("watch", "--every=0.3")
    house.wait_for(lambda: watcher.out, "its first look", 60)
    host.kill()
    host.start(key="second")
    said = watcher.ended()
    assert said.code == 7 and "is not the pinned one" in said.err, said
    assert list(house.alive()) == [run]


@fault(
    "more than ten channels of one connection (MaxSessions 10)",
    promised="a call waits until another one has ended; none fails",
    seen="fifteen commands at once: `exit 0` and their own words for each",
)
def test_more_channels_than_the_host_allows(house: House, host: Sshd) -> None:
    link = Link(resolve(load().pick(["lab"])[0]))
    answers: dict[int, tuple[int | None, bytes]] = {}

    def ask(number: int) -> None:
        out = bytearray()
        status = link.run(
            f"sleep 0.4; echo {number}; exit 0", on_stdout=out.extend, on_stderr=lambda data: None
        )
        answers[number] = (status, bytes(out))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    link.close()
    assert answers == {number: (0, b"%d\n" % number) for number in range(15)}


@fault(
    "a host that allows one channel a connection (MaxSessions 1), or none",
    promised="doctor asks one thing after the other; without any the refusal is one line",
    seen="doctor finds `ssh` and `agent` in order; `it opens no channel`",
)
def test_a_host_with_one_channel_is_enough(house: House, host: Sshd) -> None:
    host.kill()
    host.start(MaxSessions=1)
    checks = {check["name"]: check["state"] for check in house.type("doctor", "--json").json["checks"]}
    assert [checks[name] for name in ("ssh", "pct", "container", "agent", "tmux")] == ["ok"] * 5
    host.kill()
    host.start(MaxSessions=0)
    link = Link(resolve(load().pick(["lab"])[0]))
    with pytest.raises(ConnectionLost, match="it opens no channel"):
        link.run("true", on_stdout=lambda data: None, on_stderr=lambda data: None)
    link.close()


@fault(
    "24 boxes of one host logged in to at once (MaxStartups 10:30:100; 10:100:100 drops all above ten)",
    promised="a few logins at a time, and again where one was dropped all the same: every box answers",
    seen="exit 0, `through` from each",
)
@pytest.mark.parametrize("limit", ["10:30:100", "10:100:100"])
def test_many_boxes_of_one_host_are_logged_in_to_in_turn(house: House, host: Sshd, limit: str) -> None:
    host.kill()
    host.start(MaxStartups=limit)
    before = host.log.read_text().count("Accepted publickey")
    names = [house.box(f"box-{number}", host_key=host.host_key) for number in range(24)]
    try:
        said = house.type("exec", "echo through", *(f"--box={name}" for name in names))
    finally:
        for name in names:
            del house.inventory[name]
        house.box("lab")
    assert (said.code, said.out.count("through")) == (0, 24), said
    assert host.log.read_text().count("Accepted publickey") - before == 24


@fault(
    "a host that hangs up before its first word, as OpenSSH does to some while too many log in",
    promised="tried again, five times in some seconds; a login that has begun is not",
    seen="exit 0, `through` after two of them; else exit 7, `the connection broke before the login was done`",
)
def test_a_host_that_hangs_up_at_once_is_asked_again(house: House, host: Sshd) -> None:
    house.wire.hang_up(2)
    said = house.type("exec", "echo through")
    assert (said.code, said.out) == (0, "through\n") and house.wire.fired, said
    house.wire.hang_up(logins.TRIES)
    said = house.type("exec", "echo through")
    assert said.code == 7 and house.wire.fired, said
    assert "the connection broke before the login was done" in said.err and said.err.count("error:") == 1


@fault(
    "two operators at once",
    promised="one changes the box, the other is told who, since when and with what; looks are free",
    seen="exit 8, `ana@`, `holds this box`, `with stop`; status meanwhile shows run and owner",
)
def test_the_second_operator_is_told_who_is_at_work(house: House, host: Sshd) -> None:
    said = house.type("restart", "--json", "--set=behave=ignore-term")
    slow = said.json["start"]["run"]
    patient = house.box("patient", host_key=host.host_key, grace_s=60)
    first = house.start("abort", "--box", patient, user="ana")
    house.wait_for((house.runs / slow / "stop.json").exists, "the stop has begun", 60)
    began = time.monotonic()
    second = house.type("restart")
    assert second.code == 8, second
    assert "ana@" in second.err and "holds this box" in second.err and "with stop" in second.err
    assert house.type("deploy").code == 8
    assert time.monotonic() - began < 50, "they waited for the grace"
    look = house.status()
    assert look["snapshot"]["run"]["id"] == slow and look["snapshot"]["lock"]["operator"]["user"] == "ana"
    for pid in house.alive()[slow]:
        if b"trainer" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    done = first.ended()
    assert done.code == 0 and f"stopped {slow}" in done.out, done
    assert house.alive() == {} and house.run_ids()[-1] == slow


@fault(
    "two operators restart at the same moment",
    promised="one run alive; nobody is told of a start that was none",
    seen="each ends with exit 0 and a run of its own, or with exit 8, `holds this box`; one run is alive",
)
def test_two_restarts_at_once_leave_one_run(house: House, host: Sshd, run: str) -> None:
    both = [house.start("restart", "--json", user=user) for user in ("ana", "ben")]
    said = [each.ended() for each in both]
    assert {each.code for each in said} <= {0, 8} and 0 in {each.code for each in said}, said
    assert all("holds this box" in each.out for each in said if each.code == 8), said
    started = sorted(each.json["start"]["run"] for each in said if each.code == 0)
    assert house.run_ids()[-len(started) :] == started
    assert list(house.alive()) == [started[-1]]
