"""A run that was started again shows what its last attempt does: no rate, ETA or word of the dead one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from controller import history, progress, render
from controller.verdict import judge

SCREENS = Path(__file__).resolve().parent.parent / "golden" / "screens"
DIED_AT, RESUMED = 26, 24  # the steps of the recorded case


def again() -> dict[str, Any]:
    """Killed at step 26, trained again from the checkpoint of step 24, and no step is done yet."""
    return dict(json.loads((SCREENS / "warming-up-restarted.json").read_text("utf-8"))["snapshot"])


def line(snapshot: dict[str, Any], step: int, ago_s: float) -> dict[str, Any]:
    old = snapshot["run"]["metrics"][0]
    return {**old, "step": step, "time": snapshot["now"] - ago_s, "step_s": 2.0, "tokens": 1000}


def dead_lines(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Those beyond the checkpoint, which the new attempt has not taken back yet."""
    return [line(snapshot, step, 90 - step) for step in range(RESUMED + 1, DIED_AT + 1)]


def shown(snapshot: dict[str, Any]) -> str:
    return render.one_line("lab/200", judge(snapshot), snapshot)


def test_healthy_and_the_rate_begin_with_a_steady_step_of_this_attempt() -> None:
    snapshot = again()
    run = snapshot["run"]
    assert shown(snapshot) == "lab/200  WARMING-UP for 1s  no steady step yet"
    run["metrics"].append(line(snapshot, 25, 0.9))  # fills the queues
    run["state"]["step"] = 25
    assert judge(snapshot).word == "warming-up"
    run["metrics"].append(line(snapshot, 26, 0.5))
    run["state"]["step"] = 26
    assert shown(snapshot) == "lab/200  HEALTHY for 1s  500 tok/s, step 26 of 120"
    run["metrics"] += [line(snapshot, step, 0.1) for step in (27, 28)]
    run["state"]["step"] = 28
    assert shown(snapshot).endswith("500 tok/s, step 28 of 120, ETA 3m 04s")


def test_a_clock_set_back_hides_no_step_of_this_attempt() -> None:
    snapshot = again()
    snapshot["run"]["metrics"] += [line(snapshot, step, 86400) for step in (25, 26)]
    assert progress.of(snapshot["run"]).steady_steps == 1


def test_an_attempt_that_passed_over_a_damaged_checkpoint_has_its_first_steps_too() -> None:
    snapshot = again()
    run = snapshot["run"]
    run["metrics"] = [each for each in run["metrics"] if each["step"] <= 20]
    run["metrics"] += [line(snapshot, step, 30 - step) for step in (21, 22)]
    run["state"]["step"] = 22
    assert progress.of(run).steady_steps == 1


def test_an_attempt_that_loads_stands_at_its_checkpoint() -> None:
    snapshot = again()
    run = snapshot["run"]
    kept_loss = run["metrics"][-1]["loss"]
    run["metrics"] += [{**each, "loss": 99.0} for each in dead_lines(snapshot)]
    run["state"].update(phase="starting", step=0, loss=None, training_since=None)
    found = progress.of(run)
    assert (found.step, found.steady_steps, found.eta_s, found.loss) == (RESUMED, 0, None, kept_loss)
    assert judge(snapshot).word == "starting"
    assert (history.figures(run, snapshot["now"]).loss or 99.0) < 9.0, "nor do the dead ones stand in `runs`"


def test_without_a_checkpoint_an_attempt_that_loads_has_no_loss_at_all() -> None:
    snapshot = again()
    run = snapshot["run"]
    run["attempts"]["crashes"][0]["resume"] = None
    run["state"].update(phase="starting", step=0, loss=None, tau=None)
    found = history.figures(run, snapshot["now"])
    assert (found.step, found.loss, found.last_loss, found.tokens_per_s) == (0, None, None, None)


def test_a_dead_attempts_state_neither_stalls_nor_silences_the_next_one() -> None:
    """After a pause of minutes the trainer lives a moment before its first state."""
    snapshot = again()
    run, long_ago = snapshot["run"], snapshot["now"] - 300
    run["metrics"] += dead_lines(snapshot)
    run["state"].update(
        pid=43, step=DIED_AT, loss=5.0, **dict.fromkeys(("heartbeat", "progress_at"), long_ago)
    )
    run["attempts"]["crashes"][0]["again_at"] = snapshot["now"] - 1
    assert shown(snapshot) == "lab/200  STARTING for 1s  loading"
    assert progress.of(run).step == RESUMED


@pytest.mark.parametrize("told", [True, False])
def test_between_two_attempts_there_is_no_time_to_go(told: bool) -> None:
    snapshot = again()
    run = snapshot["run"]
    run["metrics"] += dead_lines(snapshot)
    run["processes"] = [each for each in run["processes"] if each["role"] != "trainer"]
    run["state"]["step"] = DIED_AT
    run["attempts"]["restarted"] = 0
    assert progress.of({**run, "processes": []}).eta_s is not None, "or nothing is tested here"
    if told:
        run["attempts"]["crashes"][0]["again_at"] = snapshot["now"]
        expected = "crashed at step 26, starts again now (restart 1 of 3)"
    else:
        run["attempts"] = None
        expected = "the trainer is gone, its supervisor is about to say what follows"
    assert shown(snapshot) == f"lab/200  DEGRADED  {expected}"


def test_a_run_that_ended_keeps_the_figures_of_its_last_attempt() -> None:
    snapshot = again()
    run = snapshot["run"]
    run["metrics"] += [line(snapshot, step, 1.0) for step in range(25, 30)]
    before = copy.deepcopy(run)
    run["processes"], run["exit"] = [], {"at": snapshot["now"], "code": 0, "reason": "finished"}
    assert progress.of(run).tokens_per_s == progress.of(before).tokens_per_s == 500
