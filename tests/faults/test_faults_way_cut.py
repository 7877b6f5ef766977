"""The way breaks, stands still or crawls in each phase of each command."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller import links
from controller.inventory import load

from .house import IDLE_S, House, Said
from .table import fault

BROKEN_IN_LOGIN = "the connection broke before the login was done"
BROKEN = "the connection broke"
SILENT_IN_LOGIN = "it does not answer within 8 s"
SILENT = "no sign of life for 4 s"
PHASES = ["key exchange", "login", "request", "work", "work, in silence"]


@pytest.fixture(scope="module")
def login(built: House) -> dict[str, int]:
    """The bytes of each direction that a login takes; what comes after is the command's."""
    built.wire.heal()
    links.get(load().pick(["lab"])[0])
    passed = dict(built.wire.passed)
    links.close_all()
    return passed


def bytes_before(phase: str, login: dict[str, int]) -> tuple[str, int]:
    """Where to break: a direction and how many bytes of it pass."""
    return {
        "key exchange": ("up", 1000),
        "login": ("up", login["up"] - 200),
        "request": ("up", login["up"] + 9_000),  # the agent's program has arrived by half
    }[phase]


def assert_told(house: House, code: int, err: str, phase: str, early: str, late: str) -> None:
    assert house.wire.fired, "the fault came too late to mean anything"
    assert (code, err.count("error:")) == (7, 1), err
    late = SILENT if "silence" in phase else late
    assert (early if phase in ("key exchange", "login") else late) in err


@fault(
    "SSH cut in a deploy: key exchange, login, request, stream of files, answer",
    promised="`current` names a whole release before and after; no lock, no debris once it is done again",
    seen="exit 7, `the connection broke`; every file of the current release is whole; done again it deploys",
)
@pytest.mark.parametrize("phase", ["key exchange", "login", "request", "stream", "end of the stream"])
def test_a_cut_deploy_changes_nothing_and_the_next_one_is_whole(
    house: House, login: dict[str, int], phase: str
) -> None:
    before = house.whole()
    wanted = house.change_payload(300_000)
    ask = login["up"] + 25_000
    ends = {"stream": ("up", ask + 150_000), "end of the stream": ("up", ask + 300_000)}
    house.wire.cut_at(*(ends.get(phase) or bytes_before(phase, login)))
    said = house.type("deploy")
    assert_told(house, said.code, said.err, phase, BROKEN_IN_LOGIN, BROKEN)
    assert house.whole() == before
    house.wire.heal()
    house.wait_for(lambda: house.status()["snapshot"]["lock"] is None, "the cut deploy lets go")
    again = house.type("deploy")
    assert (again.code, again.out.split()[:2]) == (0, ["deployed", wanted])
    assert house.whole() == wanted
    assert not [name for name in house.releases() if name.startswith(".")]


@fault(
    "SSH cut in a deploy after all has arrived",
    promised="it goes on to its end without a reader, or does nothing",
    seen="exit 7; then the new release is current, and the same command says `unchanged`",
)
def test_a_deploy_that_had_arrived_whole_goes_on(house: House) -> None:
    wanted = house.change_payload(100_000)

    def arrived() -> bool:
        return any((house.opt / "releases").glob(".incoming-*/manifest.json"))

    with house.when(arrived, house.wire.cut):
        said = house.type("deploy")
    assert said.code == 7 and "goes on only if it had arrived whole" in said.err, said
    house.wait_for(lambda: house.whole() == wanted, "the deploy ends by itself")
    house.wait_for(lambda: house.status()["snapshot"]["lock"] is None, "and lets go")
    assert house.type("deploy").out.startswith(f"unchanged {wanted}")


@fault(
    "the way stands still in a deploy",
    promised="told after the idle deadline (20 s, here 4); another operator is told who holds the box",
    seen="exit 7, `no sign of life for 4 s`; exit 8 with the owner; `unlock` frees the box, then it deploys",
)
def test_a_deploy_on_a_frozen_way_ends_and_a_second_one_is_told_who_holds_the_box(
    house: House, login: dict[str, int]
) -> None:
    before, wanted = house.whole(), house.change_payload(300_000)
    house.wire.freeze_at("up", login["up"] + 25_000 + 150_000)
    said = house.type("deploy")
    assert_told(house, said.code, said.err, "stream", SILENT_IN_LOGIN, SILENT)
    second = house.type("deploy")  # a new connection passes; the old one's agent still waits for bytes
    assert second.code == 8 and "holds this box" in second.err and "with deploy" in second.err
    assert "invoke unlock ends it if it hangs" in second.err
    assert house.whole() == before
    freed = house.type("unlock", "--yes")
    assert freed.code == 0 and "with deploy" in freed.out, freed
    third = house.type("deploy")
    assert (third.code, third.out.split()[:2]) == (0, ["deployed", wanted]), third
    assert house.whole() == wanted and not [name for name in house.releases() if name.startswith(".in")]


@fault(
    "the way stands still in the key exchange and in the login",
    promised="told after the connect deadline (15 s; 8 s in the test), not as a refused key",
    seen="exit 7, `it does not answer within 8 s`",
)
@pytest.mark.parametrize("phase", ["key exchange", "login"])
def test_a_login_on_a_frozen_way_is_no_refused_key(house: House, login: dict[str, int], phase: str) -> None:
    house.wire.freeze_at(*bytes_before(phase, login))
    said = house.type("deploy")
    assert_told(house, said.code, said.err, phase, SILENT_IN_LOGIN, SILENT)
    assert "authorized_keys" not in said.err


@fault(
    "a slow way (300 KB/s), with megabytes on it",
    promised="slow is not dead: nothing is given up as long as bytes move",
    seen="exit 0, `deployed`, whole",
)
def test_a_slow_way_is_not_a_dead_one(house: House) -> None:
    wanted = house.change_payload(1_500_000)
    house.wire.rate = 300_000
    began = time.monotonic()
    said = house.type("deploy")
    assert time.monotonic() - began > IDLE_S  # longer than silence would have been borne
    assert (said.code, said.out.split()[:2]) == (0, ["deployed", wanted])
    assert house.whole() == wanted


@pytest.fixture
def logged(house: House) -> Iterator[bytes]:
    """A finished run with a log of a megabyte, which nothing squeezes."""
    text, folder = os.urandom(1_000_000), house.runs / "r-9001"
    folder.mkdir(parents=True)
    (folder / "exit.json").write_text('{"schema": 1, "code": 0, "at": 1, "reason": "finished"}')
    (folder / "train.log").write_bytes(text)
    yield text
    shutil.rmtree(folder)


@fault(
    "SSH cut in the first read of `logs --follow`: before and after its first byte",
    promised="it goes on by itself, as later; a host that was never reached is told at once",
    seen="exit 0, `reading again` or `following again from byte`, no byte twice or missing; else exit 7",
)
@pytest.mark.parametrize(
    ("direction", "count", "says"),
    [("up", 9_000, "reading again"), ("down", 300_000, "following again from byte")],
)
def test_a_follow_outlives_a_cut_of_its_first_read(
    house: House, login: dict[str, int], logged: bytes, direction: str, count: int, says: str
) -> None:
    house.wire.cut_at(direction, login[direction] + count)
    follower = house.start("logs", "--follow", "--lines=0", "--run=r-9001")
    assert follower.process.wait(90) == 0, follower.err
    assert house.wire.fired and follower.bytes == logged
    assert follower.err.count(BROKEN) == follower.err.count(says) == 1, follower.err


@pytest.mark.parametrize("phase", ["key exchange", "login"])
def test_a_follow_that_never_began_ends_at_once(house: House, login: dict[str, int], phase: str) -> None:
    house.wire.cut_at(*bytes_before(phase, login))
    said = house.type("logs", "--follow")
    assert_told(house, said.code, said.err, phase, BROKEN_IN_LOGIN, BROKEN)
    assert "again" not in said.err


def running(house: House) -> str:
    said = house.type("restart", "--json")
    assert said.code == 0, said
    return str(said.json["start"]["run"])


def type_and_cut(house: House, login: dict[str, int], phase: str, run: str, task: str) -> Said:
    """The command, cut in this phase; `work`: the stop of `run` has begun; `in silence`: frozen, not cut."""
    if not phase.startswith("work"):
        house.wire.cut_at(*bytes_before(phase, login))
        return house.type(task)
    act = house.wire.cut if phase == "work" else house.wire.freeze
    with house.when((house.runs / run / "stop.json").exists, act):
        return house.type(task)


@fault(
    "SSH cut in a restart: key exchange, login, request, work (there frozen, too)",
    promised="what had not arrived did nothing, what had arrived goes on; never two runs alive, no step lost",
    seen="exit 7 with `shows how far it got` as the mend; one run alive: the old one, or one that resumes it",
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_cut_restart_leaves_one_run_alive(house: House, login: dict[str, int], phase: str) -> None:
    old = running(house)
    said = type_and_cut(house, login, phase, old, "restart")
    assert_told(house, said.code, said.err, phase, BROKEN_IN_LOGIN, BROKEN)
    house.wire.heal()
    if not phase.startswith("work"):
        assert list(house.alive()) == [old]
        assert house.status()["snapshot"]["run"]["id"] == old
        return
    assert "shows how far it got" in said.err
    house.wait_for(lambda: house.status()["snapshot"]["lock"] is None, "the restart goes on to its end")
    [new] = house.wait_for(house.alive, "a run is alive")
    assert new != old and house.file(old, "exit.json")["reason"] == "stopped"
    saved = max((house.runs / old / "checkpoints").iterdir()).name
    assert house.file(new, "run.json")["resume_from"]["step"] == int(saved.removeprefix("step-"))


@fault(
    "SSH cut in an abort: key exchange, login, request, work (there frozen, too)",
    promised="what had not arrived did nothing; a stop that began goes on to its end and loses no step",
    seen="exit 7; the run goes on, or is stopped with its last step saved; abort again: `nothing to stop`",
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_cut_abort_stops_all_or_nothing(house: House, login: dict[str, int], phase: str) -> None:
    run = running(house)
    said = type_and_cut(house, login, phase, run, "abort")
    assert_told(house, said.code, said.err, phase, BROKEN_IN_LOGIN, BROKEN)
    house.wire.heal()
    if not phase.startswith("work"):
        assert list(house.alive()) == [run]
        assert house.type("abort").out.startswith(f"stopped {run} at step ")
        return
    house.wait_for(lambda: not house.alive(), "the stop goes on to its end")
    house.wait_for(lambda: house.status()["snapshot"]["lock"] is None, "and lets go")
    assert "nothing to stop" in house.type("abort").out
    assert house.status()["verdict"] == "stopped"
    step = house.file(run, "state.json")["step"]
    assert (house.runs / run / "checkpoints" / f"step-{step:06d}" / "complete.json").is_file()


@pytest.fixture
def weights(house: House) -> tuple[str, bytes]:
    """A stopped run whose checkpoint has 3 MiB of weights."""
    run = running(house)
    assert house.type("abort").code == 0
    data = os.urandom(3 << 20)
    (max((house.runs / run / "checkpoints").iterdir()) / "model.safetensors").write_bytes(data)
    return run, data


@fault(
    "SSH cut, frozen and slow in a fetch",
    promised="it goes on at the byte where it broke off; the folder appears whole or not at all",
    seen="exit 0, `where it broke off`, byte for byte; cut in the login: exit 7, nothing here",
)
@pytest.mark.parametrize("how", ["cut", "freeze", "slow"])
def test_a_fetch_outlives_the_way(
    house: House, login: dict[str, int], weights: tuple[str, bytes], tmp_path: Path, how: str
) -> None:
    run, data = weights
    fetch = ["fetch", run, "--out", str(tmp_path)]
    if how == "cut":
        house.wire.cut_at("up", login["up"] - 200)
        said = house.type(*fetch)
        assert_told(house, said.code, said.err, "login", BROKEN_IN_LOGIN, BROKEN)
        assert list(tmp_path.iterdir()) == []
    breaks: dict[str, Callable[[str, int], None]] = {
        "cut": house.wire.cut_at,
        "freeze": house.wire.freeze_at,
    }
    house.wire.heal()
    if how == "slow":
        house.wire.rate = 1_000_000
    else:
        breaks[how]("down", login["down"] + 1_500_000)
    said = house.type(*fetch)
    assert said.code == 0 and said.out.startswith("fetched "), said
    assert how == "slow" or (house.wire.fired and "where it broke off" in said.err)
    [folder] = tmp_path.iterdir()
    fetched = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert fetched == hashlib.sha256(data).hexdigest()
