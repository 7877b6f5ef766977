"""Thread-local tracing: each race is made certain in fx_cases.py, fails without the fix and works with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
PAYLOAD = HERE.parents[1] / "remote_payload"
FX_ERROR = "Detected that you are using FX to symbolically trace a dynamo-optimized function"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """CASE/FIX -> {"value": …} or {"error": …}; each case ran in a process of its own."""
    run = subprocess.run(
        [sys.executable, str(HERE / "fx_cases.py")],
        env={**os.environ, "PYTHONPATH": str(PAYLOAD)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(run.stdout)


def value(outcome: dict[str, Any]) -> Any:
    assert "value" in outcome, outcome.get("traceback", outcome)
    return outcome["value"]


RACES = {
    "call_during_make_fx": ([2.0, 2.0, 2.0], FX_ERROR),
    "call_during_symbolic_trace": ([2.0, 2.0, 2.0], FX_ERROR),
    "call_of_a_wrapper_made_before_install": ([2.0, 2.0, 2.0], FX_ERROR),
    "call_after_two_traces_overlapped": ([2.0, 2.0, 2.0], "CURRENT_PATCHER is None"),
    "eager_module_during_symbolic_trace": ([2, 4], "module is not installed as a submodule"),
    "compile_of_a_module_during_symbolic_trace": (
        {"difference": 0.0, "graphs": 1},
        "module is not installed as a submodule",
    ),
    "compile_of_flex_when_a_make_fx_ends": (True, "CURRENT_PATCHER is None"),
}


@pytest.mark.parametrize("case", RACES)
def test_another_threads_trace_does_no_harm_with_the_fix(outcomes: dict[str, Any], case: str) -> None:
    assert value(outcomes[f"{case}/full"]) == RACES[case][0]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="how it fails differs by torch version")
@pytest.mark.parametrize("case", RACES)
def test_without_the_fix_it_fails_as_upstream_reports_say(outcomes: dict[str, Any], case: str) -> None:
    assert RACES[case][1] in outcomes[f"{case}/none"]["error"]


def test_a_call_during_another_threads_compile_works(outcomes: dict[str, Any]) -> None:
    assert value(outcomes["call_during_compile/full"]) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "case", ["nested_in_make_fx", "nested_in_symbolic_trace", "nested_while_another_thread_compiles"]
)
def test_a_thread_that_really_nests_still_gets_torchs_error(outcomes: dict[str, Any], case: str) -> None:
    assert FX_ERROR in outcomes[f"{case}/full"]["error"]


def test_traces_give_the_same_graphs_as_without_the_fix(outcomes: dict[str, Any]) -> None:
    graphs = value(outcomes["graphs_of_a_trace/full"])
    assert graphs == value(outcomes["graphs_of_a_trace/none"])
    assert "self.linear(x)" in graphs[0] and "aten.gelu" in graphs[1]


def test_a_higher_order_operator_can_still_clear_the_flag(outcomes: dict[str, Any]) -> None:
    assert value(outcomes["flag_inside_a_higher_order_operator/full"]) == [True, False, True]


def test_is_compiling_is_true_only_in_the_thread_that_compiles(outcomes: dict[str, Any]) -> None:
    assert value(outcomes["is_compiling_here_and_elsewhere/full"])[1] is False
    if torch.__version__.startswith("2.13."):
        assert value(outcomes["is_compiling_here_and_elsewhere/none"]) == [True, True]
        assert value(outcomes["is_compiling_here_and_elsewhere/full"]) == [True, False]


def test_an_eager_mask_leaves_the_process_wide_annotations_alone(outcomes: dict[str, Any]) -> None:
    assert value(outcomes["eager_mask_annotates/full"]) is False


def test_a_compiled_mask_equals_the_eager_one(outcomes: dict[str, Any]) -> None:
    assert value(outcomes["compiled_mask_equals_eager/full"]) is True


def test_installing_twice_changes_nothing_and_reports_the_same(outcomes: dict[str, Any]) -> None:
    twice = value(outcomes["install_twice/full"])
    assert twice["same"] and twice["report"] == twice["again"]
    assert twice["report"]["torch"] == torch.__version__
    parts = ("flag", "is_compiling", "dense_to_ordered", "module_patches", "make_fx")
    assert {twice["report"][part] for part in parts} <= {"patched", "native"}
    assert twice["report"]["other_threads"] == []


def test_install_refuses_while_another_thread_compiles(outcomes: dict[str, Any]) -> None:
    assert "before threads start" in outcomes["install_while_another_thread_compiles/full"]["error"]


def test_dynamo_limits_reach_new_threads_and_the_own_one(outcomes: dict[str, Any]) -> None:
    seen = value(outcomes["limits_in_threads/full"])
    assert seen == {
        "new thread": {"recompile_limit": 64, "fail_on_recompile_limit_hit": True},
        "own thread": 64,
    }


def test_a_thread_past_the_limit_raises_instead_of_running_eager(outcomes: dict[str, Any]) -> None:
    assert value(outcomes["limit_raises_in_a_thread/full"]) == "FailOnRecompileLimitHit at 4"


def test_forbidden_dense_flex_says_what_it_would_have_cost(outcomes: dict[str, Any]) -> None:
    error = outcomes["dense_flex_where_forbidden/full"]["error"]
    assert "ran dense on cpu: queries (1, 2, 512, 8), keys (1, 2, 512, 8), 2 MiB of scores" in error
