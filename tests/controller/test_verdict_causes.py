"""Where a cause begins and ends: each threshold from both sides, on recorded snapshots."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller import causes, crash, progress, verdict

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/golden/screens"


def read(name: str) -> Json:
    return dict(json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["snapshot"])


def kinds(snapshot: Json, gpus: int | None = None) -> tuple[str, ...]:
    return verdict.judge(snapshot, gpus=gpus).causes


def test_every_cause_has_a_recorded_case_with_a_mend() -> None:
    """Of the kinds named in the code, so that a new one without a screen fails here."""
    source = "".join((ROOT / f"controller/{name}.py").read_text() for name in ("causes", "crash", "verdict"))
    named = set(re.findall(r'Cause\(\s*"([a-z-]+)"', source)) | {kind for _, kind, _, _ in crash._KNOWN}
    cases = [json.loads(path.read_text("utf-8")) for path in FOLDER.glob("*.json")]
    shown = {kind for case in cases for kind in case.get("causes", [])}
    assert named - shown == set()
    assert shown - named == set()
    for case in cases:
        told = {key: case[key] for key in ("why", "mend", "last", "container_off", "gpus") if key in case}
        found = verdict.judge(case["snapshot"], **told)
        assert found.mend or found.word != "degraded", found


@pytest.mark.parametrize(
    ("verb", "word"), [("restart", "starting"), ("start", "starting"), ("stop", "crashed")]
)
def test_a_folder_without_a_record_is_a_start_under_way_or_nothing(verb: str, word: str) -> None:
    """A start makes the folder first and writes its record a moment later; a look may fall between."""
    run: Json = {"id": "r-0007", "record": None, "state": None, "exit": None, "metrics": [], "processes": []}
    lock = {"operator": {"user": "ana", "host": "desk"}, "verb": verb, "since": 99.0, "pid": 7}
    assert verdict.judge({"now": 100.0, "run": run, "lock": lock}).word == word


def moved(quiet: float) -> Callable[[Json], None]:
    def change(snapshot: Json) -> None:
        compiling = snapshot["run"]["state"]["compile"]
        compiling["moved_at"] = snapshot["now"] - quiet

    return change


@pytest.mark.parametrize(("quiet", "expected"), [(599, ()), (601, ("stuck-compile",))])
def test_a_warm_up_may_last_as_long_as_compiles_come_and_go(quiet: float, expected: tuple[str, ...]) -> None:
    snapshot = read("warming-up-for-long-but-moving")
    moved(quiet)(snapshot)
    assert kinds(snapshot) == expected


def test_a_compile_that_moved_nothing_is_stuck_whatever_moved_beside_it() -> None:
    """The heartbeat and other threads' progress say nothing about the compiler."""
    snapshot = read("degraded-stuck-compile")
    snapshot["run"]["state"]["progress_at"] = snapshot["now"] - 1
    assert kinds(snapshot) == ("stuck-compile",)
    snapshot["run"]["state"]["compile"]["active"] = False  # between two compiles, progress counts
    assert kinds(snapshot) == ()


@pytest.mark.parametrize("phase", ["checkpointing", "evaluating", "training"])
def test_a_stall_is_armed_anew_after_a_checkpoint_or_an_evaluation(phase: str) -> None:
    """Ten minutes of evaluation, then half a minute of training: the last step is long ago, yet no stall."""
    snapshot = read("stalled")
    state, now = snapshot["run"]["state"], snapshot["now"]
    assert verdict.judge(snapshot).word == "stalled"
    if phase == "training":
        state["progress_at"] = now - 30  # what the trainer writes when it turns back to training
    else:
        state.update(phase=phase, phase_since=now - 600, progress_at=now - 600)
    assert verdict.judge(snapshot).word == "healthy"


def test_an_earlier_hang_is_not_blamed_for_a_later_one() -> None:
    snapshot = read("stalled-with-a-hung-thread")
    assert kinds(snapshot) == ("stalled", "hung-thread")
    snapshot["run"]["state"]["progress_at"] = (
        snapshot["now"] - 70
    )  # stalled, and the watchdog is yet to speak
    assert kinds(snapshot) == ("stalled",)


@pytest.mark.parametrize(("rate", "expected"), [(0.86, ()), (0.84, ("slow",))])
def test_slow_begins_below_85_percent_of_the_baseline(rate: float, expected: tuple[str, ...]) -> None:
    snapshot = read("healthy-at-its-baseline")
    run = snapshot["run"]
    run["baseline"]["tokens_per_s"] = 54000 / 4.2 / rate
    assert kinds(snapshot) == expected


def test_slow_needs_fifty_steady_steps_and_forgives_a_few_long_ones() -> None:
    snapshot = read("degraded-slow")
    run = snapshot["run"]
    run["metrics"] = run["metrics"][-49:]
    assert kinds(snapshot) == ()
    snapshot = read("healthy-at-its-baseline")
    for line in snapshot["run"]["metrics"][::3]:
        line["step_s"] = 40.0
    assert kinds(snapshot) == ()


def test_a_power_limit_that_is_reached_is_no_fault() -> None:
    """As recorded from an H200 at full load: the clock is held down by the power cap alone."""
    snapshot = read("healthy-at-its-baseline")
    assert snapshot["gpus"]["rows"][0]["throttle"] == ["sw_power_cap"]
    assert verdict.judge(snapshot).word == "healthy"


def test_the_inventory_s_count_of_gpus_stands_above_what_the_run_began_with() -> None:
    snapshot = read("degraded-gpu-gone-since-the-start")
    assert kinds(snapshot, gpus=6) == ()
    assert verdict.judge(snapshot, gpus=7).reasons == ("6 of 7 GPUs of the inventory are here",)


def test_an_old_xid_and_a_program_s_own_do_not_degrade() -> None:
    snapshot = read("healthy-at-its-baseline")
    created = snapshot["run"]["record"]["created"]
    snapshot["xids"] = [
        {"at": created - 10, "bus": "0000:43:00", "number": 79, "text": ""},
        {"at": created + 10, "bus": "0000:43:00", "number": 31, "text": ""},
    ]
    assert kinds(snapshot) == ()
    snapshot["xids"][0]["at"] = created + 1
    assert kinds(snapshot) == ("xid",)


def test_a_loader_is_the_cause_only_when_it_works_all_the_time() -> None:
    snapshot = read("degraded-loader-starves")
    for line in snapshot["run"]["metrics"]:
        line["busy"]["loader"] = 0.4  # it waits for the targets: they wait for something else
    assert kinds(snapshot) == ()


def test_two_recompiles_are_bad_luck_and_ten_of_twenty_are_a_cause() -> None:
    snapshot = read("healthy-one-side-waits")
    lines = snapshot["run"]["metrics"]
    for count, expected in ((2, ()), (9, ()), (10, ("recompiling",))):
        for number, line in enumerate(reversed(lines)):
            line["compile"] = number < count
        assert kinds(snapshot) == expected, count
    assert progress.of(snapshot["run"]).tokens_per_s == pytest.approx(54000 / 4.2)


def test_a_short_burst_in_the_log_is_no_cause() -> None:
    snapshot = read("degraded-log-growth")
    snapshot["run"]["log"]["growth"] = {"bytes": 50_000_000, "seconds": 12.0}
    assert kinds(snapshot) == ()
    snapshot["run"]["log"]["growth"] = None
    assert kinds(snapshot) == ()


@pytest.mark.parametrize("free", [10**6, 10**12])
def test_a_full_disk_elsewhere_is_not_the_run_s(free: int) -> None:
    snapshot = read("degraded-disk")
    mine = next(disk for disk in snapshot["disks"] if disk["path"] == "/var/lib/pctrun")
    mine["free_bytes"] = free
    snapshot["disks"][0]["free_bytes"] = 0  # /opt/pctrun
    assert kinds(snapshot) == (("disk",) if free < 10**9 else ())


def test_facts_of_an_older_agent_or_from_memory_are_judged_without_the_missing_ones() -> None:
    snapshot = read("healthy-at-its-baseline")
    for key in ("gpus", "xids", "disks", "shm", "stale"):
        del snapshot[key]
    for key in ("baseline", "log"):
        del snapshot["run"][key]
    assert verdict.judge(snapshot).word == "healthy"
    assert causes.against_baseline(snapshot["run"]) is None


def test_the_gravest_cause_gives_the_mend() -> None:
    snapshot = read("degraded-throttled-and-slow")
    snapshot["run"]["processes"][1]["state"] = "T"
    found = verdict.judge(snapshot)
    assert found.causes == ("suspended", "gpu-throttled", "slow")
    assert found.mend.startswith("invoke exec 'kill -CONT")


def test_a_mistake_of_long_ago_in_the_log_does_not_explain_an_end() -> None:
    """The exception counts; what the log's tail says is asked only where there is none."""
    snapshot = read("crashed-diverged")
    log = snapshot["run"]["log"]
    log["tail"] = ["CUDA out of memory, trying again"]
    assert kinds(snapshot) == ("exit", "diverged")
    log["traceback"], snapshot["run"]["exit"]["detail"] = [], ""
    assert kinds(snapshot) == ("gpu-memory",)
