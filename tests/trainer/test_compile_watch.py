"""The compile watch, against compiles that really happen."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer import compile_watch
from trainer.__main__ import main
from trainer.compile_watch import CompileWatch
from trainer.record import RunRecord

PATIENCE_S = 60.0


@pytest.fixture
def watch() -> Iterator[CompileWatch]:
    torch._dynamo.reset()
    watch = CompileWatch()
    watch.start()
    yield watch
    watch.stop()


def test_nothing_compiled_reads_as_nothing(watch: CompileWatch) -> None:
    nothing = {"count": 0, "seconds": 0.0, "active": False, "moved_at": None, "threads": 0, "fallbacks": []}
    assert watch.snapshot() == nothing
    assert not watch.grew_since(watch.snapshot())
    assert watch.limit_hits() == []


def test_a_compile_counts_once_and_a_cached_call_does_not(watch: CompileWatch) -> None:
    function = torch.compile(lambda x: x.sin() + 1, backend="aot_eager")
    before = watch.snapshot()
    function(torch.ones(3))
    after = watch.snapshot()
    assert after["count"] == 1 and after["seconds"] > 0 and not after["active"] and after["threads"] == 1
    assert watch.grew_since(before)
    function(torch.ones(3))
    assert not watch.grew_since(after)
    assert watch.snapshot()["seconds"] == after["seconds"]


def test_each_new_shape_counts(watch: CompileWatch) -> None:
    function = torch.compile(lambda x: x.cos() + 1, backend="aot_eager", dynamic=False)
    for length in (2, 3, 4, 2, 3, 4):
        function(torch.ones(length))
    assert watch.snapshot()["count"] == 3


def test_a_compile_in_one_thread_is_seen_from_another_while_it_runs(watch: CompileWatch) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        inside.set()
        assert leave.wait(PATIENCE_S)
        return graph

    function = torch.compile(lambda x: x.tan() + 1, backend=slow_backend)
    before = watch.snapshot()
    thread = threading.Thread(target=function, args=(torch.ones(3),))
    thread.start()
    try:
        assert inside.wait(PATIENCE_S)
        during = watch.snapshot()
        assert during["active"] and during["count"] == 1 and during["threads"] == 1
        assert watch.grew_since(before)
        later = watch.snapshot()
        assert later["seconds"] > during["seconds"] > 0
    finally:
        leave.set()
        thread.join()
    after = watch.snapshot()
    assert not after["active"] and after["seconds"] > later["seconds"]
    assert before["moved_at"] is None and after["moved_at"] > during["moved_at"], (
        "a stuck compile moves nothing"
    )
    assert watch.grew_since(during)  # a step that began in the middle of a compile is no measure either
    assert not watch.grew_since(after)


def test_two_threads_that_compile_are_told_apart(watch: CompileWatch) -> None:
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(3))
    thread = threading.Thread(target=torch.compile(lambda x: x + 3, backend="eager"), args=(torch.ones(3),))
    thread.start()
    thread.join()
    assert watch.snapshot()["threads"] == 2


def test_a_compile_that_fails_ends_the_episode(watch: CompileWatch) -> None:
    def broken_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        torch.compile(lambda x: x + 4, backend=broken_backend)(torch.ones(3))
    snapshot = watch.snapshot()
    assert snapshot["count"] == 1 and not snapshot["active"]


def test_a_recompile_limit_that_is_hit_is_named_with_function_and_reason(watch: CompileWatch) -> None:
    def doomed(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    function = torch.compile(doomed, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        for length in (2, 3, 4, 5):
            function(torch.ones(length))
    (hit, *_) = watch.limit_hits()
    assert (hit.limit, hit.value) == ("recompile_limit", "2")
    assert "'doomed'" in hit.function and "size mismatch at index 0" in hit.reason
    assert str(hit).startswith("'doomed'") and "hit recompile_limit=2 and runs eager" in str(hit)
    assert watch.snapshot()["fallbacks"][0] == str(hit)


def test_a_stopped_watch_keeps_its_figures_and_counts_no_more(watch: CompileWatch) -> None:
    torch.compile(lambda x: x + 6, backend="eager")(torch.ones(3))
    watch.stop()
    watch.stop()
    torch.compile(lambda x: x + 7, backend="eager")(torch.ones(3))
    assert watch.snapshot()["count"] == 1


def test_starting_twice_counts_once(watch: CompileWatch) -> None:
    watch.start()
    torch.compile(lambda x: x + 8, backend="eager")(torch.ones(3))
    assert watch.snapshot()["count"] == 1


def test_stop_survives_that_someone_cleared_dynamos_callbacks(watch: CompileWatch) -> None:
    torch._dynamo.callback.callback_handler.clear()
    watch.stop()
    assert watch.snapshot()["active"] is False


def test_compiles_are_told_with_function_and_reason(watch: CompileWatch) -> None:
    torch._dynamo.utils.clear_compilation_metrics()

    def grown(x: torch.Tensor) -> torch.Tensor:
        return x * 8

    function, before = torch.compile(grown, backend="aot_eager", dynamic=False), compile_watch.graphs()
    function(torch.ones(2))
    function(torch.ones(3))
    first, second = compile_watch.compiles()
    assert first.function == second.function == "grown" and first.reason is None and first.seconds > 0
    assert "size mismatch at index 0" in str(second)
    assert compile_watch.graphs() == before + 2


def test_after_the_warm_up_a_compile_in_any_thread_raises_and_eager_code_does_not(
    watch: CompileWatch,
) -> None:
    def warm(x: torch.Tensor) -> torch.Tensor:
        return x * 9

    function, raised = torch.compile(warm, backend="aot_eager", dynamic=False), []
    function(torch.ones(2))
    before = watch.snapshot()
    compile_watch.forbid_recompiles()
    try:

        def elsewhere() -> None:
            function(torch.ones(2))
            warm(torch.ones(3))
            try:
                function(torch.ones(3))
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    finally:
        compile_watch.allow_recompiles()
    assert len(raised) == 1 and "warm" in raised[0]
    assert not watch.grew_since(before)
    function(torch.ones(3))
    assert watch.grew_since(before)


def test_what_replaces_distutils_is_imported_before_any_thread_compiles() -> None:
    """Two first compiles at once once met in it and killed a warm-up."""
    shown = "import sys, trainer.compile_watch; print('torch.utils.cpp_extension' in sys.modules)"
    command, payload = [sys.executable, "-c", shown], Path(compile_watch.__file__).parents[1]
    assert subprocess.run(command, cwd=payload, capture_output=True, text=True).stdout.strip() == "True"


def test_a_function_that_falls_back_in_any_thread_ends_the_run_within_a_step(
    watch: CompileWatch, tmp_path: Path, tiny_release: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def doomed(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    function, honest = torch.compile(doomed, backend="eager", dynamic=False), RunRecord.metric
    lenient = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False)

    def elsewhere() -> None:
        with lenient:
            for length in (2, 3, 4):
                function(torch.ones(length))

    def metric(record: RunRecord, **line: object) -> None:
        honest(record, **line)
        if line["step"] == 2:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    monkeypatch.setattr(RunRecord, "metric", metric)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("trainer.session.fx_threads.set_dynamo_limits", lambda: None)  # those make it raise
    run_dir = tmp_path / "run"
    order = {"release_dir": str(tiny_release), "recipe": "tiny", "overrides": {}, "resume_from": None}
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps(order))
    assert main(["--run-dir", str(run_dir)]) == 1
    assert "a compiled function fell back to eager: 'doomed'" in capsys.readouterr().err
    state = json.loads((run_dir / "state.json").read_text())
    assert any("hit recompile_limit=1 and runs eager" in note for note in state["notes"]), state["notes"]
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
