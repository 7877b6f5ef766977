"""What a person reads about many runs, about one, about two; and that memory outlives the container."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import (
    history,
    mirror,
    records,
    rollback,
    runs,
    runs_diff,
    runs_pin,
    runs_prune,
    runs_show,
    source,
    status,
)
from controller.console import Console
from controller.errors import NotRunning, PctrunError, Unreachable, Usage
from controller.execution import execute
from controller.history import History
from controller.inventory import Box, Roots

FOLDER = "/var/lib/pctrun/runs"
LAB = Box(name="lab", host="pve1", vmid=201, recipe="qwen")
NOW = 1_790_000_000.0


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """A run that has finished, as the agent's `runs` describes it."""
    created = NOW - 10_000 * (10 - number)
    lines = [
        {"step": step, "loss": 3.5 - 0.001 * step, "tokens": 900, "step_s": 0.5, "compile": step == 241}
        for step in range(241, 301)
    ]
    values = {"name": "qwen", "train": {"steps": 300, "lr": 6e-4, "seed": 0}, "topology": {"drafters": 3}}
    record = {
        "id": f"r-{number:04d}",
        "created": created,
        "recipe": "qwen",
        "release": "9f31c2aa77de0001",
        "overrides": {"train.steps": 300},
        "resume_from": None,
        "operator": {"user": "ana", "host": "desk"},
        "config_hash": "aaaabbbbccccdddd",
        "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"},
        "cache": {"choice": "kept", "key": "0123456789abcdef"},
    }
    found = {
        "id": record["id"],
        "record": record,
        "state": {"phase": "finished", "step": 300, "steps": 300, "heartbeat": created + 400},
        "exit": {"reason": "finished", "at": created + 400, "code": 0},
        "stop": None,
        "pin": None,
        "metrics": lines,
        "evaluations": [{"step": 150, "time": 1.0, "tau": 1.55}, {"step": 300, "time": 2.0, "tau": 1.82}],
        "checkpoints": [{"step": 300, "at": created + 390}],
        "export": True,
        "processes": [],
        "provenance": {
            "source": {"commit": "1a2b3c4d5e6f70819203", "dirty": None},
            "recipe": values,
            "packages": {"torch": "2.11.0", "einops": "0.8.1", "numpy": "2.3.1"},
            "environment": "77aa77aa77aa77aa",
            "gpus": {"count": 8, "names": {"NVIDIA H200": 8}, "driver": "580.95.05"},
            "machine": {"hostname": "ct", "kernel": "Linux 6.14", "cpus": 64, "memory_bytes": 2**39},
        },
        "curves": {"first": 1, "steps": [100, 200, 300], "loss": [5.0, 4.0, 3.2]},
    }
    found.update(copy.deepcopy(changes))
    return found


def changed() -> dict[str, Any]:
    """The same run with another torch, another learning rate, and what came of it."""
    other = entry(7)
    other["record"]["versions"]["torch"] = "2.13.0"
    other["record"]["release"] = "77de9f31c2aa0002"
    other["record"]["resume_from"] = {"run": "r-0006", "step": 120, "path": "/x"}
    other["provenance"]["recipe"]["train"]["lr"] = 3e-4
    other["provenance"]["source"]["dirty"] = "99aa99aa99aa99aa"
    other["provenance"]["packages"]["einops"] = "0.8.2"
    other["provenance"]["gpus"] = {"count": 7, "names": {"NVIDIA H200": 7}, "driver": "580.95.05"}
    other["curves"] = {"first": 121, "steps": [160, 230, 300], "loss": [4.4, 4.2, 3.36]}
    for line in other["metrics"]:
        line["step_s"] = 0.4
    other["evaluations"][-1]["tau"] = 1.64
    other["attempts"] = attempts(NOW - 3000)
    return other


def attempts(at: float) -> dict[str, Any]:
    """One crash that was tried again."""
    says = "RuntimeError: CUDA error: unspecified launch failure"
    crash = {"at": at, "step": 130, "code": 1, "signal": None, "says": says, "failure": f"1 {says}"}
    crash |= {"again_at": at + 15, "resume": {"step": 120, "path": "/x"}}
    return {"limit": 3, "restarted": 1, "given_up": None, "crashes": [crash]}


def alive() -> dict[str, Any]:
    found = entry(
        9,
        exit=None,
        export=False,
        pin={"at": 1.0, "reason": "the paper", "operator": {"user": "bo", "host": "lap"}},
    )
    found["state"] = {"phase": "training", "step": 280, "steps": 300, "progress_at": NOW, "heartbeat": NOW}
    found["attempts"] = attempts(NOW - 3000)
    found["processes"] = [
        {"pid": 5, "role": "trainer", "state": "S"},
        {"pid": 4, "role": "supervisor", "state": "S"},
    ]
    return found


def test_the_table(golden: Callable[[str, str], None]) -> None:
    crashed = entry(
        6, exit={"reason": "crashed", "at": NOW, "code": 1, "detail": "x"}, evaluations=[], metrics=[]
    )
    found = History([alive(), entry(8), crashed], NOW, 9)
    rows = [runs.document(each, found) for each in found.entries]
    text = runs._table(rows, found)
    golden("screens/runs-table.txt", text)
    assert all(len(line) <= 100 for line in text.splitlines())
    rows[0]["release"] = "77de9f31c2aa0002"
    golden("screens/runs-table-80-columns.txt", runs._table(rows, found, 80))
    rows[1]["recipe"] = "qwen3.6-27b-paper"
    rows[0]["resume_from"] = {"run": "r-0008", "step": 300, "path": "/x"}
    rows[0]["overrides"] = {"train.steps": 300, "train.lr": 0.001}
    golden("screens/runs-table-of-a-resumed-run.txt", runs._table(rows, found, 100))
    golden("screens/runs-table-60-columns.txt", runs._table(rows, found, 60))


def test_the_table_tells_what_was_set_differently() -> None:
    same, other = {"compile": "off", "train.lr": 0.001}, {"compile": "off", "drafter.layers": 2}
    assert runs._changed([same, other, same]) == ["lr=0.001", "layers=2", "lr=0.001"]
    assert runs._changed([same, {**same, "train.steps": 9}]) == ["", ""]  # the steps have a column
    assert runs._changed([{"a.x": 1, "b.x": 1}, {"a.x": 2, "b.x": 2}]) == ["a.x=1 b.x=1", "a.x=2 b.x=2"]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_table_loses_nothing_in_silence_to_a_narrow_terminal(width: int) -> None:
    """Each column stands in the table or is spoken of below it."""
    names = ("smollm2-135m", "qwen3.6-27b-paper")
    entries = [entry(number) for number in range(9, 3, -1)]
    entries[2]["record"]["resume_from"] = {"run": "r-0006", "step": 120, "path": "/x"}
    entries[3]["seen_at"] = time.time() - 600
    for number, each in enumerate(entries):
        each["record"]["overrides"] = {"train.lr": number / 1000}
        each["record"] |= {"recipe": names[number % 2], "release": f"9f31c2aa{number}"}
    found = History(entries, NOW, 9)
    rows = [runs.document(each, found) for each in found.entries]
    head, *lines = runs._table(rows, found, width).splitlines()
    assert "…" not in "".join(lines)
    assert all(len(line) <= max(width, 76) for line in (head, *lines))
    alike = [line.removeprefix("every run: ") for line in lines if line.startswith("every run: ")]
    missing = [line.partition(":")[0] for line in lines if line.startswith("no room for ")]
    shown, told = set(head.split()), set(" ".join(alike + missing).replace(",", "").split())
    assert [name for name in runs._HEAD if name and (name in shown) == (name in told)] == []


def test_one_run_with_all_that_made_it(golden: Callable[[str, str], None], at_hand: Any) -> None:
    at_hand([alive()])
    text = runs_show.run(LAB, Console(), run_id="r-0009").text
    golden("screens/runs-show.txt", text)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_short_run_says_over_how_many_steps_its_loss_is(at_hand: Any) -> None:
    short = entry(8)
    del short["metrics"][10:]
    short["state"]["loss"] = short["metrics"][-1]["loss"]
    at_hand([short])
    done = runs_show.run(LAB, Console(), run_id="r-0008")
    assert "loss       3.2545, mean of its last 10 steps; 3.2500 at its last step" in done.text
    assert done.document["loss_steps"] == 10
    at_hand([{**short, "metrics": []}])
    assert "loss       3.2500 at its last step" in runs_show.run(LAB, Console(), run_id="r-0008").text


def test_a_run_without_its_record_is_shown_without_guesses(at_hand: Any) -> None:
    at_hand([entry(8, record=None)])
    text = runs_show.run(LAB, Console(), run_id="r-0008").text
    assert "its run.json cannot be read: recipe, release, what it resumed are not known" in text
    assert "None" not in text and "from scratch" not in text


def test_two_runs_side_by_side(golden: Callable[[str, str], None], at_hand: Any) -> None:
    at_hand([entry(6), changed()])
    done = runs_diff.run(LAB, Console(), first="r-0006", second="r-0007")
    golden("screens/runs-diff.txt", done.text)
    assert all(len(line) <= 100 for line in done.text.splitlines())
    assert "99aa99aa99aa99aa" in done.text  # whole: what is cut off may be what differs
    assert done.document["window"] == [281, 300]
    named = {(row["group"], row["name"]): row for row in done.document["differs"]}
    assert named["recipe", "train.lr"]["b"] == 3e-4
    speed = next(row for row in done.document["outcome"] if row["name"] == "tok/s")
    assert speed["change"] == pytest.approx(0.25)


def test_two_equal_runs_differ_in_nothing(at_hand: Any) -> None:
    at_hand([entry(6), entry(7)])
    done = runs_diff.run(LAB, Console(), first="r-0006", second="r-0007")
    assert done.document["differs"] == []
    assert "differs by chance" in done.text


def test_runs_from_before_every_value_was_recorded_are_still_compared(at_hand: Any) -> None:
    old = entry(6, provenance=None)
    del old["curves"]
    at_hand([old, changed()])
    done = runs_diff.run(LAB, Console(), first="r-0006", second="r-0007")
    assert ("versions", "torch") in {(row["group"], row["name"]) for row in done.document["differs"]}
    at_hand([old])
    assert runs_show.run(LAB, Console(), run_id="r-0006").text


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], None]:
    """The next look finds these entries."""

    def give(entries: list[dict[str, Any]]) -> None:
        monkeypatch.setattr(history, "look", lambda *args, **options: History(entries, NOW, 9))

    return give


def in_container(box: Box, script: str, stdin: bytes | None = None) -> None:
    result = execute(box, ["sh", "-c", script], stdin=stdin)
    assert result.code == 0, result.stderr


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PCTRUN_STATE", str(tmp_path))
    return tmp_path


@pytest.fixture
def past(box: Box, state: Path) -> Iterator[Box]:
    """Two runs that have ended, in the container."""
    for number in (1, 2):
        found = entry(number)
        place = f"{FOLDER}/r-76{number:02d}"
        record = {**found["record"], "id": f"r-76{number:02d}", "env": {"TOKEN": "s3cret"}}
        for name, value in (
            ("run.json", record),
            ("exit.json", found["exit"]),
            ("provenance.json", found["provenance"]),
        ):
            in_container(box, f"mkdir -p {place} && cat > {place}/{name}", json.dumps(value).encode())
        lines = "".join(json.dumps(line) + "\n" for line in found["metrics"])
        in_container(box, f"cat > {place}/metrics.jsonl", lines.encode())
    yield box
    in_container(box, f"rm -rf {FOLDER}/r-7601 {FOLDER}/r-7602")


def test_what_was_seen_is_remembered_when_the_box_is_gone(
    past: Box, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = runs.run(past, Console()).document["runs"]
    assert [each["id"] for each in seen][:2] == ["r-7602", "r-7601"]
    assert seen[0]["source"] == {"commit": "1a2b3c4d5e6f70819203", "dirty": None}
    kept = sorted(path.name for path in (state / "runs" / "sandbox").iterdir())
    assert [name.split("-")[1] for name in kept] == ["7601", "7602"]
    assert "s3cret" not in "".join(path.read_text() for path in (state / "runs" / "sandbox").iterdir())
    named = runs_diff.run(past, Console(), first="newest", second="r-7601").document
    assert (named["a"], named["b"]) == ("r-7602", "r-7601")
    with pytest.raises(Usage, match="r-7602 is one run"):
        runs_diff.run(past, Console(), first="newest", second="r-7602")
    again = runs.run(past, Console()).document["runs"]
    assert again[0]["source"] == seen[0]["source"]  # it did not travel again

    def gone(*args: object, **options: object) -> None:
        raise Unreachable("lost pve1: the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(history, "call", gone)
        late = runs.run(past, Console())
        assert late.document["from_memory"] and re.search(r"FINISHED  \d+s ago  ", late.text)
        assert "what follows is from memory" in capsys.readouterr().err
        diff = runs_diff.run(past, Console(), first="r-7601", second="newest").document
        assert (diff["a"], diff["b"]) == ("r-7601", "r-7602")
        with pytest.raises(Unreachable):
            runs_show.run(past, Console(), run_id="r-9999")


def test_a_box_that_went_away_keeps_its_last_known_word(
    past: Box, state: Path, real_box: Callable[..., Box]
) -> None:
    verdict, snapshot = status.look(past, "r-7602")
    assert verdict.word == "finished" and snapshot is not None
    assert "s3cret" not in "".join(path.read_text() for path in (state / "runs" / "sandbox").iterdir())
    gone = real_box(port=1)
    assert status.look(gone)[0].reasons == ("127.0.0.1:1 refuses the connection",)
    (state / "runs" / "sandbox").rename(state / "runs" / gone.name)
    late = status.look(gone)[0]
    assert (late.word, late.summary) == ("unreachable", "last seen finished 0s ago: r-7602 at step 300")
    assert late.last is not None and late.last["step"] == 300


def test_a_pruned_run_is_asked_for_first_and_remembered_after(
    past: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.run(past, Console())
    with pytest.raises(Usage, match="nothing was removed: nobody is here to answer 'remove 1 run of "):
        runs_prune.run(past, Console(), keep=1)
    assert runs_pin.run(past, Console(), run_id="r-7601", reason="why").text == "r-7601 is pinned"
    assert "r-7601 (pinned)" in runs_prune.run(past, Console(), keep=1).text
    runs_pin.run(past, Console(), run_id="r-7601", off=True)
    done = runs_prune.run(past, Console(), keep=1, yes=True)
    assert done.document["removed"] == ["r-7601"]
    assert done.text.startswith("removed 1 run, ")
    capsys.readouterr()
    late = runs_show.run(past, Console(), run_id="r-7601")
    assert late.document["id"] == "r-7601" and re.search(r", seen \d+s ago\n", late.text)
    assert "note" not in late.text and capsys.readouterr().err.startswith(
        "r-7601 is in the container no more: what is said of it is from memory"
    )
    with pytest.raises(NotRunning):
        runs_show.run(past, Console(), run_id="r-7699")


def test_a_rollback_without_a_release_says_what_to_do(box: Box) -> None:
    """In a place of its own: other tests may have deployed to this container's usual one."""
    empty = Roots(**{name: f"/tmp/no-release/{name}" for name in records.fields(Roots)})
    with pytest.raises(PctrunError, match="previous release"):
        rollback.run(box.replace(roots=empty), Console())


def test_the_source_of_a_payload_is_its_commit_and_what_differs(tmp_path: Path) -> None:
    assert source.of(tmp_path) is None
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]

    def do(*words: str) -> None:
        import subprocess

        subprocess.run([*git, *words], check=True, capture_output=True)

    payload = tmp_path / "payload"
    payload.mkdir()
    (payload / "a.py").write_text("a = 1\n")
    do("init", "-q")
    do("add", ".")
    do("commit", "-qm", "one")
    clean = source.of(payload)
    assert clean is not None and len(clean["commit"]) == 40 and clean["dirty"] is None
    (tmp_path / "elsewhere.py").write_text("b = 1\n")
    assert source.of(payload) == clean
    (payload / "a.py").write_text("a = 2\n")
    edited = source.of(payload)
    (payload / "new.py").write_text("c = 3\n")
    more = source.of(payload)
    assert edited is not None and more is not None
    assert edited["commit"] == clean["commit"]
    assert len({clean["dirty"], edited["dirty"], more["dirty"]}) == 3
    assert source.text(edited) == f"{clean['commit'][:12]} + diff {edited['dirty']}"


def test_a_folder_that_cannot_be_written_costs_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCTRUN_STATE", "/proc/nowhere")
    mirror.keep(LAB, [entry(1)])
    assert mirror.read(LAB) == []
