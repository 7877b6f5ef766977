"""The container is stopped, killed, rebooted, suspended or locked under a run and under a command."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from controller.deadline import Deadline
from controller.sandbox.pct.host import Host, read_pairs, write_pairs

from .house import House, Started
from .table import fault


def in_mid_run(house: House) -> tuple[str, Started]:
    """A run with a checkpoint, and a watch on it that has had its first look."""
    said = house.type("restart", "--json")
    assert said.code == 0, said
    run = str(said.json["start"]["run"])
    house.wait_for(lambda: list((house.runs / run).glob("checkpoints/*/complete.json")), "a checkpoint")
    watcher = house.start("watch", "--every=0.3")
    house.wait_for(lambda: watcher.out, "the watch has looked", 60)
    return run, watcher


def last_saved(house: House, run: str) -> int:
    return max(int(path.parent.name[5:]) for path in (house.runs / run).glob("checkpoints/*/complete.json"))


@pytest.fixture
def host(house: House) -> Iterator[House]:
    """The container runs and is unlocked again after the test."""
    yield house
    config = Host(str(house.base / "sandbox")).config_path(200)
    write_pairs(config, {key: value for key, value in read_pairs(config).items() if key != "lock"})
    if "stopped" in house.pct("status", "200"):
        house.pct("start", "200")


ENDS: dict[str, Callable[[House], object]] = {
    "pct stop": lambda house: house.pct("stop", "200"),
    "init killed": lambda house: os.kill(house.init, signal.SIGKILL),
}


@fault(
    "container stopped (pct stop) or killed in mid-run",
    promised="told as off, started by nobody but a person; then the run resumes at its checkpoint",
    seen="status exit 5, `the container is off`, `pct start 200`; after the start exit 4, `was started anew`",
)
@pytest.mark.parametrize("how", list(ENDS))
def test_a_container_that_ends_in_mid_run(host: House, how: str) -> None:
    run, watcher = in_mid_run(host)
    ENDS[how](host)
    watched = watcher.ended()
    assert watched.code == 5 and "container 200 on 127.0.0.1 is not running" in watched.err, watched
    off = host.type("status")
    assert off.code == 5 and "NOT-RUNNING  the container is off" in off.out
    assert f"{run} at step" in off.out and "pct start 200" in off.out
    for words in (["deploy"], ["restart"], ["abort"], ["logs"]):
        said = host.type(*words)
        assert said.code == 5 and "pct start 200" in said.err, said
    assert "stopped" in host.pct("status", "200")
    host.pct("start", "200")
    crashed = host.type("status")
    assert crashed.code == 4 and "was started anew" in crashed.out, crashed
    saved = last_saved(host, run)
    again = host.type("restart", "--json").json["start"]
    assert (again["resume_from"]["run"], again["resume_from"]["step"]) == (run, saved)


@fault(
    "container rebooted in mid-run (SIGTERM to all, then a new start)",
    promised="the last step is saved; nobody is blamed who did not do it; the watch comes back",
    seen="`UNREACHABLE` in the watch; exit 5, `by nobody on record` or `its last state says so`",
)
def test_a_reboot_in_mid_run_loses_no_step(host: House) -> None:
    run, watcher = in_mid_run(host)
    host.pct("reboot", "200")
    watched = watcher.ended()
    assert watched.code == 5 and "UNREACHABLE" in watched.out, watched
    assert watched.out.splitlines()[-1].split()[1] == "STOPPED"
    seen = host.type("status")
    assert seen.code == 5 and "STOPPED" in seen.out, seen
    assert "by nobody on record" in seen.out or "its last state says so" in seen.out
    step = host.file(run, "state.json")["step"]
    assert last_saved(host, run) == step
    assert host.type("restart", "--json").json["start"]["resume_from"]["step"] == step


@fault(
    "container stopped while a deploy streams",
    promised="`current` stays whole; the next deploy clears up",
    seen="exit 7, `was killed: it was stopped`; after the start the same command deploys, no debris",
)
def test_a_container_that_stops_under_a_deploy(host: House) -> None:
    before = host.whole()
    wanted = host.change_payload(400_000)
    host.wire.rate = 400_000

    def half() -> bool:
        return any((host.opt / "releases").glob(".incoming-*/trainer/extra.bin"))

    def stop() -> None:
        host.wire.rate = 20_000  # or a slow stop comes too late
        host.pct("stop", "200")

    with host.when(half, stop):
        said = host.type("deploy")
    assert said.code == 7 and "was killed: it was stopped" in said.err, said
    assert host.whole() == before
    host.wire.heal()
    host.pct("start", "200")
    assert host.type("deploy").out.split()[:2] == ["deployed", wanted]
    assert host.whole() == wanted and not [name for name in host.releases() if name.startswith(".")]


@fault(
    "container locked (`lock: backup` in its configuration)",
    promised="looks, deploy, restart and abort need no lock of pct and go on; doctor says what it prevents",
    seen="exit 0 of all of them; doctor: `locked (backup)`, `pct unlock 200`",
)
def test_a_locked_container_is_worked_with_and_told(host: House) -> None:
    config = Host(str(host.base / "sandbox")).config_path(200)
    write_pairs(config, {**read_pairs(config), "lock": "backup"})
    assert host.type("deploy").code == 0
    assert host.type("restart").code == 0
    host.wait_for(lambda: host.status()["verdict"] == "warming-up", "its first steps")
    assert host.type("abort").out.startswith("stopped ")
    checks = {check["name"]: check for check in host.type("doctor", "--json").json["checks"]}
    lock = checks["container"]
    assert lock["state"] == "warning" and "locked (backup)" in lock["says"], lock
    assert "pct unlock 200" in lock["mend"]


@fault(
    "pct's configuration lock held by another task (pct start, push or a backup at work)",
    promised="`pct exec` takes no such lock: nothing waits",
    seen="status, restart and abort in less than the 10 s for which pct waits",
)
def test_a_held_configuration_lock_makes_nothing_wait(host: House) -> None:
    waited = []
    with Host(str(host.base / "sandbox")).lock(200):
        for words, code in (("restart", 0), ("status", 6), ("abort", 0)):
            began = time.monotonic()
            assert host.type(words).code == code
            waited.append(time.monotonic() - began)
    assert max(waited) < 10, waited


@fault(
    "container suspended (a backup in suspend mode, lxc-freeze)",
    promised="a look ends at its deadline (60 s, here 5) and says so; the run goes on with it",
    seen="exit 7, `UNREACHABLE`, `no answer within 5 s`, the last word; then the same run again",
)
def test_a_suspended_container_is_unreachable_and_then_itself(
    host: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, watcher = in_mid_run(host)
    watcher.process.terminate()
    watcher.ended()
    assert host.status()["snapshot"]["run"]["id"] == run
    stopped: set[int] = set()
    monkeypatch.setattr("controller.status._LOOK", Deadline(total=5))

    def send(pids: set[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def suspend() -> None:
        stopped.update(host.pids())
        send(stopped, signal.SIGSTOP)

    suspend()
    try:
        with host.when(lambda: set(host.pids()) - stopped, suspend):  # the look's own agent, too
            said = host.type("status")
    finally:
        send({*host.pids(), *stopped}, signal.SIGCONT)
    assert said.code == 7 and "UNREACHABLE" in said.out and "no answer within 5 s" in said.out, said
    assert f"{run} at step" in said.out
    step = host.file(run, "state.json")["step"]
    host.wait_for(lambda: host.file(run, "state.json")["step"] > step, "the run goes on")
    assert host.status()["snapshot"]["run"]["id"] == run
