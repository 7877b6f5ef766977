"""Every verdict word from a recorded snapshot, and the screen that a person sees for it."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller import console, progress, render, status, verdict, wait, watch_looks, words
from controller.errors import WaitTimedOut
from controller.inventory import Box

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "screens"
CASES = sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{name}.json").read_text("utf-8")))


def judged(case: dict[str, Any]) -> verdict.Verdict:
    told = {key: case[key] for key in ("why", "mend", "last", "container_off", "gpus") if key in case}
    return verdict.judge(case["snapshot"], vmid=200, **told)


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_and_the_screen_of(name: str, golden: Callable[[str, str], None]) -> None:
    case = read(name)
    found = judged(case)
    screen = render.screen("lab/200", found, case["snapshot"])
    golden(f"screens/{name}.txt", screen)
    assert found.word == case["word"]
    assert list(found.causes) == case.get("causes", [])
    assert len(screen.splitlines()) <= render.HEIGHT
    assert all(len(line) <= render.WIDTH for line in screen.splitlines())
    assert screen.startswith(f"lab/200  {case['word'].upper()}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", [60, 80])
def test_no_word_is_torn_and_no_reason_lost_in_a_narrow_terminal(name: str, width: int) -> None:
    case = read(name)
    found = judged(case)
    screen = render.screen("lab/200", found, case["snapshot"], width=width, height=40).splitlines()
    assert all(len(line) <= width for line in screen)
    told = " ".join(" ".join(screen).split())
    whole = " ".join(" ".join(render.screen("lab/200", found, case["snapshot"]).splitlines()).split())
    for text in ("since Sep 21", "ETA ", "release "):
        assert (text in told) == (text in whole), text
    if width >= 80 and len(found.reasons) == 1 and "…" not in whole:
        assert found.reasons[0].split()[-1] in told


def test_a_screen_is_as_wide_as_its_terminal_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        for columns, width in ((80, 80), (300, 100), (20, 60)):
            termios.tcsetwinsize(terminal, (24, columns))
            assert console.screen_width() == width
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert console.screen_width() == 100


@pytest.mark.parametrize("name", ["crashed-host-memory", "degraded-loader-starves"])
def test_what_to_do_on_the_host_names_the_box_own_container(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PCTRUN_STATE", str(tmp_path))
    monkeypatch.setattr(status, "call", lambda *args, **more: read(name)["snapshot"])
    box = Box(name="lab", host="h", vmid=321, recipe="r")
    assert "pct set 321 -" in status.look(box)[0].mend


@pytest.mark.parametrize(
    ("name", "saved", "command"),
    [
        ("crashed-diverged", True, "invoke restart --from r-0002 --from-scratch --set train.lr=LOWER"),
        ("crashed-diverged", False, "invoke restart --from r-0002 --from-scratch --set train.lr=LOWER"),
        ("degraded-side-starves", True, "invoke restart --from r-0002 --set topology.split=7:1"),
        ("crashed-recompiled", True, "invoke restart --from r-0002 --fresh-cache;"),
    ],
)
def test_what_is_set_anew_is_set_beside_what_the_run_had(name: str, saved: bool, command: str) -> None:
    snapshot = read(name)["snapshot"]
    snapshot["run"]["record"]["overrides"] = {"train.steps": 12}
    snapshot["run"]["checkpoints"] = [{"step": 40, "bytes": 9, "at": 1.0}] * saved
    assert command in verdict.judge(snapshot).mend


def test_the_log_of_an_earlier_run_is_asked_for_by_its_name() -> None:
    snapshot = read("finished")["snapshot"]
    for later, command in (("r-0002", "invoke logs "), ("r-0099", "invoke logs --run r-0002 ")):
        snapshot["runs"] = [{"id": later}]
        assert command in render.screen("lab/200", verdict.judge(snapshot), snapshot).splitlines()[-1]


@pytest.mark.parametrize(
    ("recipe", "again"), [("smollm2-135m", "invoke restart"), ("r", "invoke restart --from r-0002")]
)
def test_a_look_knows_what_its_box_restarts(
    recipe: str, again: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PCTRUN_STATE", str(tmp_path))
    monkeypatch.setattr(status, "call", lambda *args, **more: read("stopped")["snapshot"])
    assert status.look(Box(name="lab", host="h", vmid=200, recipe=recipe))[0].again == again


def test_one_line_says_how_long_it_will_take_while_it_lives() -> None:
    case = read("healthy-resumed")
    assert render.one_line("lab/200", judged(case), case["snapshot"]).endswith("step 40 of 120, ETA 1m 04s")
    for name in ("finished", "stopped", "no-run"):
        case = read(name)
        assert "ETA" not in render.one_line("lab/200", judged(case), case["snapshot"])


def test_a_wait_that_ran_out_of_time_says_how_long_it_still_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = {"snapshot": read("healthy-resumed")["snapshot"]}
    monkeypatch.setenv("PCTRUN_STATE", str(tmp_path))
    monkeypatch.setattr(watch_looks, "call", lambda *_, on_part, **__: on_part(part))
    lab = Box(name="lab", host="pve1", vmid=200, recipe="smollm2-135m")
    with pytest.raises(WaitTimedOut, match="ETA 1m 04s") as caught:
        wait.run(lab, console.Console(), until="finished", timeout_s=0)
    assert caught.value.hint == "the run goes on: the same command waits on"


@pytest.mark.parametrize(("run_id", "word"), [("", "healthy"), ("r-0002", "stopped")])
def test_a_wait_for_the_newest_run_outlives_a_restart(
    run_id: str, word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped, healthy = read("stopped")["snapshot"], read("healthy")["snapshot"]
    stopped["lock"] = {"operator": {"user": "ana", "host": "desk"}, "verb": "restart", "since": 1.0, "pid": 1}

    def call(*_: Any, on_part: Callable[[dict[str, Any]], None], **__: Any) -> None:
        on_part({"snapshot": stopped})
        on_part({"snapshot": healthy})

    monkeypatch.setenv("PCTRUN_STATE", str(tmp_path))
    monkeypatch.setattr(watch_looks, "call", call)
    lab = Box(name="lab", host="pve1", vmid=200, recipe="smollm2-135m")
    assert wait.run(lab, console.Console(), run_id=run_id).word == word


@pytest.mark.parametrize(
    ("phase", "detail", "line"),
    [
        ("checkpointing", "step 120", "checkpointing at step 120 of 120"),
        (
            "checkpointing",
            "exporting the drafter",
            "checkpointing (exporting the drafter) at step 120 of 120",
        ),
        ("evaluating", "12 held-out documents", "evaluating (12 held-out documents) at step 120 of 120"),
        ("finished", "", "finished at step 120 of 120, its process is leaving"),
    ],
)
def test_an_end_begins_no_healthy_run_anew_and_has_no_time_to_go(phase: str, detail: str, line: str) -> None:
    snapshot = read("healthy-resumed")["snapshot"]
    now, state = snapshot["now"], snapshot["run"]["state"]
    state |= {"phase": phase, "detail": detail, "phase_since": now, "training_since": now - 180}
    state |= {"step": 120, "steps": 120}
    told = render.one_line("lab/200", verdict.judge(snapshot), snapshot)
    assert told == f"lab/200  HEALTHY for 3m  {line}"


def test_every_word_has_a_case_and_an_exit_code() -> None:
    assert {read(name)["word"] for name in CASES} == set(verdict.EXIT_CODES)


def test_judging_changes_nothing_and_is_repeatable() -> None:
    case = read("healthy")
    before = copy.deepcopy(case)
    assert judged(case) == judged(case)
    assert case == before


def test_a_stall_begins_just_beyond_the_limit() -> None:
    case = read("stalled")
    run = case["snapshot"]["run"]
    for step_s, limit in ((0.8, 60.0), (20.0, 200.0), (200.0, 900.0)):
        for line in run["metrics"]:
            line.update(step_s=step_s)
        for quiet, word in ((limit - 1, "healthy"), (limit + 1, "stalled")):
            run["state"]["progress_at"] = case["snapshot"]["now"] - quiet
            assert judged(case).word == word, (step_s, quiet)


def test_a_zombie_trainer_is_not_alive() -> None:
    case = read("crashed-vanished")
    case["snapshot"]["run"]["processes"] = [{"pid": 44, "role": "trainer", "state": "Z"}]
    assert judged(case).word == "crashed"


def test_compile_steps_are_in_no_figure() -> None:
    metrics = [{"step": 1, "loss": 9.0, "tokens": 100, "step_s": 100.0, "compile": True}]
    metrics += [{"step": 2, "loss": 8.0, "tokens": 500, "step_s": 0.5, "compile": False}]
    metrics += [{"step": 3, "loss": 8.0, "tokens": 500, "step_s": 60.0, "compile": True}]
    metrics += [{"step": n, "loss": 8.0, "tokens": 500, "step_s": 0.5, "compile": False} for n in (4, 5)]
    found = progress.of({"metrics": metrics, "state": {"step": 5, "steps": 15}})
    assert found.tokens_per_s == 1000
    assert found.step_s == 0.5
    assert found.eta_s == 5.0


@pytest.mark.parametrize("resumed_at", [None, 500])
def test_the_step_that_fills_the_queues_is_in_no_figure(resumed_at: int | None) -> None:
    first = (resumed_at or 0) + 1
    metrics = [{"step": first, "loss": 9.0, "tokens": 500, "step_s": 40.0, "compile": False}]
    run: dict[str, Any] = {"metrics": metrics, "state": {"step": first, "steps": first + 100}}
    source = {"run": "r-0001", "step": resumed_at, "path": "x"} if resumed_at else None
    run["record"] = {"resume_from": source}
    assert progress.of(run).steady_steps == 0
    for n in range(1, 4):
        assert progress.of(run).eta_s is None, "one or two steps are no forecast"
        metrics.append({"step": first + n, "loss": 8.0, "tokens": 500, "step_s": 0.5, "compile": False})
    assert progress.of(run).eta_s == 50.0


def test_there_is_no_eta_before_a_steady_step() -> None:
    metrics = [{"step": 1, "loss": 9.0, "tokens": 100, "step_s": 100.0, "compile": True}]
    found = progress.of({"metrics": metrics, "state": {"step": 1, "steps": 13}})
    assert (found.tokens_per_s, found.eta_s, found.steady_steps) == (None, None, 0)


def test_a_run_without_any_file_yet_is_not_an_accident() -> None:
    assert progress.of({}) == progress.Progress(0, 0, 0, None, None, None, None, None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_for_a_terminal_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    line = "lab/200  HEALTHY for 2m"
    assert "\x1b[" in render.paint(line, "healthy", Terminal())
    assert render.paint(line, "healthy", io.StringIO()) == line
    monkeypatch.setenv("NO_COLOR", "1")
    assert render.paint(line, "healthy", Terminal()) == line


def test_control_characters_of_a_log_do_not_reach_the_screen() -> None:
    case = read("healthy")
    case["snapshot"]["run"]["log"]["tail"] = [
        "\x1b[31mred\x1b[0m\r\tprogress\x07",
        "wide " * 60,
        "10%\r20%\r",
    ]
    screen = render.screen("lab/200", judged(case), case["snapshot"])
    assert all(line.isprintable() for line in screen.split("\n"))
    assert "| red" not in screen  # overwritten by what came after the carriage return
    assert "| 20%" in screen


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.08, "0.08s"), (4.23, "4.2s"), (59.6, "1m 00s"), (190, "3m 10s"), (7500, "2h 05m"), (450000, "5d 5h")],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (59, "59s"), (119, "119s"), (120, "2m"), (7199, "119m"), (90000, "25h")]
)
def test_ages_in_words(seconds: float, text: str) -> None:
    assert words.age(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (39000, "38.1 KiB"), (1 << 40, "1.0 TiB"), (1e18, "909495 TiB")],
)
def test_sizes_in_words(count: float, text: str) -> None:
    assert words.size(count) == text


@pytest.mark.parametrize(("phase", "word"), [("training", "crashed"), ("stopped", "stopped")])
def test_a_trainer_that_has_ended_is_not_about_to_start(phase: str, word: str) -> None:
    """Between its end and its exit file only the supervisor lives; a suspended one writes none at all."""
    case = read("healthy")
    run = case["snapshot"]["run"]
    run["processes"] = [entry for entry in run["processes"] if entry["role"] == "supervisor"]
    run["state"]["phase"] = phase
    found = judged(case)
    assert found.word == word
    assert "has not written yet how the trainer ended" in found.reasons[0]


def test_a_crash_on_a_full_disk_names_the_disk() -> None:
    for name in ("crashed-vanished", "crashed-traceback"):
        case = read(name)
        assert "free" not in " ".join(judged(case).reasons)
        for disk in case["snapshot"]["disks"]:
            disk["free_bytes"] = 0
        assert "has 0 B free, two checkpoints need" in judged(case).reasons[-1], name
        case["snapshot"]["run"]["checkpoints"] = []
        assert judged(case).reasons[-1].endswith("has 0 B free"), name


def test_a_living_run_without_its_record_is_no_healthy_one() -> None:
    case = read("healthy")
    case["snapshot"]["run"]["record"] = None
    found = judged(case)
    assert found.word == "degraded"
    assert "run.json is gone or damaged" in found.reasons[0]


def test_a_long_reason_is_wrapped_and_not_cut() -> None:
    case = read("crashed-refused")
    case["snapshot"]["run"]["exit"]["detail"] = "a long way " * 9 + "to the cause: lower train.lr"
    screen = render.screen("lab/200", judged(case), case["snapshot"])
    assert "lower train.lr" in screen
    assert all(len(line) <= render.WIDTH for line in screen.splitlines())


@pytest.mark.parametrize("name", ["stopped", "degraded-restarting", "crashed-vanished", "crashed-disk-full"])
@pytest.mark.parametrize(
    ("change", "own", "command"),
    [
        ({}, None, ""),
        ({}, ("smollm2-135m", {}), ""),
        ({"overrides": {"train.steps": 12}}, None, " --from {id}"),
        ({"overrides": {"train.steps": 12}}, ("smollm2-135m", {"train.steps": 12}), ""),
        ({"overrides": {"train.steps": 12}}, ("smollm2-135m", {}), " --from {id}"),
        ({}, ("another", {}), " --from {id}"),
        ({"later": "r-0099"}, ("smollm2-135m", {}), " --from {id}"),
        ({"later": "r-0099", "release": "0ld"}, None, " --from {id} --release current"),
        ({"release": "0ld"}, None, ""),
        ({"saved": [], "later": "r-0099"}, None, " --from {id} --from-scratch"),
        ({"saved": []}, None, ""),
    ],
)
def test_the_shortest_command_that_goes_on_with_this_run(
    name: str, change: dict[str, Any], own: tuple[str, Any] | None, command: str
) -> None:
    snapshot = read(name)["snapshot"]
    run, changed = snapshot["run"], dict(change)
    later = changed.pop("later", run["id"])
    run["checkpoints"] = changed.pop("saved", [{"step": 40, "bytes": 9, "at": 1.0}])
    snapshot["runs"] = [{"id": later}]
    run["record"].update(changed)
    screen = render.screen("lab/200", verdict.judge(snapshot, own=own), snapshot)
    found = re.findall(r"invoke restart((?: --(?:from-scratch|(?:from|release) [\w-]+))*)", screen)
    assert found == [command.format(id=run["id"])]
