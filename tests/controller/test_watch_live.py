"""Live: what is drawn, what survives a cut, and that all of it is one `pct exec`."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import sandbox, sparkline, wait, watch, watch_view
from controller.console import Console
from controller.errors import Unreachable, Usage, WaitTimedOut
from controller.execution import execute
from controller.inventory import Box
from controller.verdict import judge
from controller.watch_state import Seen

from .conftest import Proxy

FOLDER = "/var/lib/pctrun/runs"
SCREENS = Path(__file__).resolve().parent.parent / "golden" / "screens"


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((SCREENS / f"{name}.json").read_text("utf-8"))["snapshot"])


def whole(snapshot: dict[str, Any]) -> dict[str, Any]:
    steps = list(range(8, 813, 8))
    curves = {
        "steps": steps,
        "loss": [3 + 9 / (1 + step / 20) for step in steps],
        "tokens_per_s": [None] + [1500.0 + step / 3 for step in steps[1:]],
    }
    evaluations = [{"step": 200, "tau": 1.2}, {"step": 400, "tau": 1.5}, {"step": 600, "tau": 1.9}]
    return {"snapshot": copy.deepcopy(snapshot), "curves": curves, "evaluations": evaluations}


def new(seen: Seen, step: int, **state: Any) -> dict[str, Any]:
    assert seen.snapshot is not None
    run, now = seen.snapshot["run"], seen.snapshot["now"] + 2
    line = {
        "step": step,
        "loss": 3.0,
        "tokens": 900,
        "step_s": 0.5,
        "busy": {"target-0": 0.97, "drafter-0": 0.41},
    }
    told = {
        "id": run["id"],
        "state": {**run["state"], "step": step, "heartbeat": now, "progress_at": now, **state},
        "stop": None,
        "processes": run["processes"],
        "metrics": [line],
        "log": {"bytes": 9000 + step, "mtime": now, "tail": [f"line of step {step}"]},
    }
    return {"new": {"now": now, "lock": None, "run": told}}


def test_the_live_screen(golden: Callable[[str, str], None]) -> None:
    seen = Seen()
    seen.take(whole(recorded("healthy-eight-gpus")))
    assert seen.snapshot is not None
    first = seen.snapshot["run"]["state"]["step"]
    for step in range(first + 1, first + 9):
        seen.take(new(seen, step))
    text = watch_view.screen("lab/200", judge(seen.snapshot), seen, width=100, height=38)
    golden("screens/watch.txt", text)
    for step in range(first + 9, first + 90):
        seen.take(new(seen, step))
    narrow = watch_view.screen("lab/200", judge(seen.snapshot), seen, width=80, height=38).splitlines()
    curves = [line for line in narrow if line.startswith(("  loss", "  tok/s"))]
    assert len(curves) == 2 and all("→" in line and not line.endswith("…") for line in curves)
    assert len(text.splitlines()) <= 38
    assert all(len(line) <= 100 for line in text.splitlines())
    low = watch_view.screen("lab/200", judge(seen.snapshot), seen, width=60, height=12)
    assert len(low.splitlines()) <= 12 and all(len(line) <= 60 for line in low.splitlines())


def test_new_steps_join_the_old_ones_once_and_lines_are_not_repeated() -> None:
    seen = Seen()
    snapshot = recorded("healthy")
    snapshot["run"]["log"]["tail"] = ["a", "b", "c"]
    seen.take(whole(snapshot))
    assert seen.snapshot is not None
    last = seen.snapshot["run"]["metrics"][-1]["step"]
    part = new(seen, last)
    part["new"]["run"]["log"]["tail"] = ["b", "c", "d"]
    seen.take(part)
    steps = [line["step"] for line in seen.snapshot["run"]["metrics"]]
    assert steps == sorted(set(steps))
    assert seen.snapshot["run"]["log"]["tail"] == ["a", "b", "c", "d"]
    part = new(seen, last + 1)
    part["new"]["run"]["log"]["tail"] = ["d", "d"]  # later on an equal line is a line of its own
    seen.take(part)
    assert seen.snapshot["run"]["log"]["tail"] == ["a", "b", "c", "d", "d", "d"]
    assert seen.snapshot["run"]["metrics"][-1]["step"] == last + 1


def test_after_a_restart_the_dead_attempts_steps_are_no_figures_any_more() -> None:
    """A crash at step 27, another attempt from the checkpoint of step 20."""
    seen, snapshot = Seen(), recorded("healthy")
    snapshot["run"] |= {"metrics": [], "state": {**snapshot["run"]["state"], "steps": 100}}
    seen.take({"snapshot": snapshot, "curves": None, "evaluations": []})
    for step in range(1, 28):
        part = new(seen, step, tokens_per_s=None)
        part["new"]["run"]["metrics"][0] |= {"tau": step / 10} if step in (15, 25) else {}
        seen.take(part)
    assert seen.snapshot is not None
    again = new(seen, 21, tokens_per_s=None)
    line = {**again["new"]["run"]["metrics"][0], "loss": 7.0, "tokens": 90, "busy": {"target-0": 0.1}}
    again["new"]["run"]["metrics"] = [line, {**line, "step": 22}]
    again["new"]["run"]["attempts"] = {"restarted": 1, "crashes": [{"step": 27, "resume": {"step": 20}}]}
    seen.take(again)
    assert [line["step"] for line in seen.snapshot["run"]["metrics"]] == list(range(1, 23))
    assert [step for step, _ in seen.loss] == list(range(1, 23))
    assert list(seen.rate)[-3:] == [(20, 1800.0), (21, 180.0), (22, 180.0)]
    assert list(seen.tau) == [(15, 1.5)]
    assert watch_view._shares(seen.snapshot["run"]["metrics"][-2:]) == "target-0 10 %"


def test_a_thread_that_hangs_while_a_watch_is_open_is_named_in_it() -> None:
    seen, snapshot = Seen(), recorded("stalled-with-a-hung-thread")
    block = snapshot["run"]["log"]["traceback"]
    early = copy.deepcopy(snapshot)
    early["run"]["log"]["traceback"] = []
    seen.take(whole(early))
    run = {key: snapshot["run"][key] for key in ("id", "state", "processes", "stop")} | {"metrics": []}
    log = {"bytes": 9, "mtime": snapshot["now"], "growth": None, "tail": block}
    for more in ({"traceback": block}, {}):  # and stays named
        seen.take({"new": {"now": snapshot["now"], "run": {**run, "log": {**log, **more}}}})
        assert judge(seen.snapshot) == judge(snapshot)


def test_many_threads_are_summed_up_by_kind() -> None:
    busy = {f"target-{n}": 0.9 + n / 100 for n in range(5)} | {f"drafter-{n}": 0.5 for n in range(3)}
    assert watch_view._shares([{"busy": {**busy, "loader": 0.1}}]) == (
        "5 targets 90–94 %   3 drafters 50 %   1 loader 10 %"
    )


@pytest.mark.parametrize(
    ("points", "width", "text"),
    [
        ([], 10, ""),
        ([(0, 5.0)], 10, "▅"),
        ([(0, 1.0), (1, 1.0)], 10, "▅▅"),
        ([(n, float(n)) for n in range(16)], 8, "▁▂▃▄▅▆▇█"),
        ([(0, 0.0), (90, 1.0), (100, 1.0)], 3, "▁ █"),
    ],
)
def test_a_curve_in_one_line(points: list[tuple[float, float]], width: int, text: str) -> None:
    assert sparkline.line(points, width) == text


RUN = "r-7500"
TRAINER = """
import json, os, sys, time
folder = sys.argv[1]
def write(name, value):
    aside = f"{folder}/.{name}"
    open(aside, "w").write(json.dumps(value))
    os.replace(aside, f"{folder}/{name}")
began = time.time()
write("run.json", {"id": sys.argv[2], "created": began})
log, metrics = open(f"{folder}/train.log", "a"), open(f"{folder}/metrics.jsonl", "a")
for step in range(1, int(sys.argv[3]) + 1):
    now = time.time()
    print("step", step, file=log, flush=True)
    line = {"step": step, "time": now, "loss": 9 / step, "tokens": 100, "step_s": 0.05, "compile": False}
    print(json.dumps(line), file=metrics, flush=True)
    write("state.json", {"pid": os.getpid(), "phase": "training", "step": step, "steps": int(sys.argv[3]),
        "heartbeat": now, "progress_at": now, "training_since": began})
    time.sleep(0.05)
write("state.json", {"pid": os.getpid(), "phase": "finished", "step": step, "heartbeat": now})
write("exit.json", {"reason": "finished", "at": time.time(), "code": 0})
"""


@pytest.fixture
def training(box: Box) -> Iterator[Callable[[int], Box]]:
    """Starts a process in the container that leaves what a trainer of so many steps leaves."""
    place = f"{FOLDER}/{RUN}"

    def begin(steps: int) -> Box:
        marks = f"PCTRUN_RUN_ID={RUN} PCTRUN_RUN_DIR={place}"
        script = (
            f"mkdir -p {place} && cat > {place}/t.py && cd {place} || exit; {marks} setsid python3 t.py "
            f"{place} {RUN} {steps} >/dev/null 2>err </dev/null & echo $! > {place}/pid; "
            f"until [ $(cat {place}/metrics.jsonl | wc -l) -ge 5 ]; do sleep 0.05; done 2>/dev/null"
        )
        done = execute(box, ["sh", "-c", script], stdin=TRAINER.encode())
        assert done.code == 0, done.stderr
        return box

    yield begin
    execute(box, ["sh", "-c", f"kill $(cat {place}/pid); rm -rf {place}"])


def calls() -> int:
    return (sandbox.sandbox_dir() / "calls.log").read_bytes().count(b"\n")


def test_a_run_is_watched_to_its_end_in_one_call(
    training: Callable[[int], Box], capsys: pytest.CaptureFixture[str]
) -> None:
    box = training(90)
    before = calls()
    done = watch.run(box, Console(), run_id=RUN, every_s=0.2)
    assert calls() == before + 1
    assert (done.document["verdict"], done.document["reconnects"], done.exit_code) == ("finished", 0, 0)
    assert done.document["looks"] > 5
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said] == ["HEALTHY", "FINISHED"]


def test_an_end_is_noticed_at_once_by_a_slow_watch_and_by_a_wait(training: Callable[[int], Box]) -> None:
    box = training(60)
    before = calls()
    done = wait.run(box, Console(), until="finished", run_id=RUN)
    late = time.time() - done.document["since"]
    assert (calls() - before, done.exit_code, done.document["verdict"]) == (1, 0, "finished")
    assert late < 2
    execute(box, ["rm", f"{FOLDER}/{RUN}/exit.json", f"{FOLDER}/{RUN}/metrics.jsonl"])
    training(60)
    done = watch.run(box, Console(), run_id=RUN, every_s=60.0, capture=True)
    assert (done.document["verdict"], done.document["looks"]) == ("finished", 2)
    assert time.time() - done.document["since"] < 2


def cut_after(looks: int, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way breaks once so many looks were seen."""
    take = Seen.take

    def taken(self: Seen, part: dict[str, Any]) -> None:
        take(self, part)
        if self.looks == looks:
            proxy.cut()

    monkeypatch.setattr(Seen, "take", taken)


def test_a_wait_goes_on_after_a_cut_and_ends_in_time(
    training: Callable[[int], Box],
    real_box: Callable[..., Box],
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training(400)
    monkeypatch.setattr(wait, "FIRST_RETRY_S", 0.1)
    cut_after(2, proxy, monkeypatch)
    began = time.monotonic()
    with pytest.raises(WaitTimedOut, match=r"is not finished after 5 s: .*HEALTHY"):
        wait.run(real_box(port=proxy.port), Console(), until="finished", timeout_s=5, run_id=RUN)
    assert 5 <= time.monotonic() - began < 9
    assert proxy.served > 1


def test_cuts_are_mended_and_said(
    training: Callable[[int], Box],
    real_box: Callable[..., Box],
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(watch, "RETRY_S", (0.1,))
    training(120)
    cut_after(3, proxy, monkeypatch)
    done = watch.run(real_box(port=proxy.port), Console(), run_id=RUN, every_s=0.2)
    assert done.document["verdict"] == "finished"
    assert done.document["reconnects"] >= 1
    assert "UNREACHABLE" in capsys.readouterr().out


def test_ctrl_c_leaves_the_run_alone_and_the_terminal_as_it_was(
    training: Callable[[int], Box], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    box = training(400)
    monkeypatch.setattr(watch_view, "choose", lambda capture: watch_view.Screen())
    take = Seen.take

    def interrupt(self: Seen, part: dict[str, Any]) -> None:
        if self.looks == 3:
            raise KeyboardInterrupt
        take(self, part)

    monkeypatch.setattr(Seen, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        watch.run(box, Console(), run_id=RUN, every_s=0.2)
    out = capsys.readouterr().out
    assert out.startswith("\x1b[?1049h") and out.endswith("\x1b[?1049l")
    assert "HEALTHY" in out

    def steps() -> int:
        return int(execute(box, ["sh", "-c", f"wc -l < {FOLDER}/{RUN}/metrics.jsonl"]).stdout)

    before, ends = steps(), time.monotonic() + 30
    while steps() == before:
        assert time.monotonic() < ends, "the run does not go on"


def test_a_host_that_never_answers_is_an_error(real_box: Callable[..., Box]) -> None:
    with pytest.raises(Unreachable):
        watch.run(real_box(port=1), Console())


def test_too_many_looks_are_refused_before_anybody_is_asked() -> None:
    nowhere = Box(name="lab", host="no-such-host.invalid", vmid=200, recipe="r")
    for act in (lambda: watch.plan(nowhere, every_s=0.0), lambda: watch.run(nowhere, Console(), every_s=0.1)):
        with pytest.raises(Usage, match=r"--every wants 0\.2 seconds or more, not 0"):
            act()
