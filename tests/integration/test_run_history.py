"""From two trainings to a comparison, a picture and the drafter here: every answer in its published shape."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

pytestmark = pytest.mark.timeout(900)  # the first test trains twice
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two_runs(tiny):
    """Two finished runs that differ in one value, the second made by repeating the first."""
    tiny.invoke("deploy")
    steps = ("train.steps=6", "train.eval_every=3", "train.eval_documents=1", "train.checkpoint_every=3")
    first = ("--from-scratch", *(f"--set={each}" for each in steps))
    for wishes in first, ("--from", "r-0001", "--from-scratch", "--set=train.lr=1e-3"):
        tiny.invoke("restart", *wishes)
        seen = tiny.ask("watch", "--every", "0.5")
        assert (seen["verdict"], seen["reconnects"]) == ("finished", 0)
    return tiny


def test_the_table_knows_both_and_where_they_came_from(two_runs) -> None:
    rows = two_runs.ask("runs")["runs"]
    assert [row["verdict"] for row in rows] == ["finished", "finished"]
    assert rows[0]["step"] == 6 and rows[0]["tau"] >= 1 and rows[0]["tokens_per_s"] > 0
    shown = two_runs.ask("runs.show", "newest")
    assert shown["provenance"]["recipe"]["train"]["lr"] == 1e-3
    assert shown["provenance"]["packages"]["torch"]
    assert [each["step"] for each in shown["evaluations"]] == [3, 6]
    memory = list((two_runs.folder / ".pctrun").rglob("r-*.json"))
    assert len(memory) == 2 and all(json.loads(path.read_text())["provenance"] for path in memory)


def test_the_difference_is_the_one_value_that_was_changed(two_runs) -> None:
    found = two_runs.ask("runs.diff", "r-0001", "r-0002")
    assert [(row["group"], row["name"]) for row in found["differs"] if row["group"] == "recipe"] == [
        ("recipe", "train.lr")
    ]
    assert {"tok/s", "best", "mean of steps 1–6"} <= {row["name"] for row in found["outcome"]}


def test_the_drafter_comes_here_and_loads(two_runs, tmp_path: Path) -> None:
    got = two_runs.ask("fetch", "newest", "--out", str(tmp_path))
    assert Path(got["path"]).name == "r-0002-export" and got["step"] == 6
    from trainer.export import load_export

    assert load_export(Path(got["path"])).geometry.layers >= 1
    best = two_runs.ask("fetch", "r-0001", "--checkpoint", "best", "--out", str(tmp_path))
    assert best["tau"] is not None and (Path(best["path"]) / "optimizer.safetensors").is_file()
    assert two_runs.ask("fetch", "r-0001", "--checkpoint", "7", code=1)["error"]["kind"] == "usage"


def test_both_are_plotted_over_each_other(two_runs, tmp_path: Path) -> None:
    picture = tmp_path / "runs.png"
    assert two_runs.ask("plot", "r-0001,r-0002", "--out", str(picture))["out"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = two_runs.invoke("plot", "r-0001,r-0002")
    assert "loss" in text and "r-0001" in text and "tokens a cycle" in text


def test_the_log_is_searched_there(two_runs) -> None:
    text = two_runs.ask("logs", "--grep", "^· tau", "--since", "1h")["text"]
    assert text.count("\n") == 2 and all(line.startswith("· tau") for line in text.splitlines())


def test_pins_prune_and_rollback_speak_their_schema_too(two_runs) -> None:
    assert two_runs.ask("runs.pin", "r-0001", "--reason", "kept")["changed"]
    assert two_runs.ask("runs.prune", "--keep", "1")["kept"]["r-0001"] == "pinned"
    (two_runs.folder / "remote_payload" / "examples" / "another.txt").write_text("x")
    two_runs.invoke("deploy")
    assert two_runs.ask("rollback")["outcome"] == "switched"
    two_runs.ask("runs.pin", "r-0001", "--off")
    assert two_runs.ask("runs.prune", "--keep", "1", "--yes")["removed"] == ["r-0001"]
    assert two_runs.ask("runs.show", "r-0001")["seen_at"] is not None
    planned = json.loads(two_runs.invoke("-R", "plot", "r-0001", "--json"))
    jsonschema.validate(planned, json.loads((ROOT / "docs/schema/plot.json").read_text("utf-8")))


def test_a_finished_run_is_prolonged(two_runs) -> None:
    fewer = two_runs.ask("restart", "--from", "r-0002", "--set=train.steps=5", code=1)["error"]
    assert fewer["message"] == "r-0002 stands at step 6, and train.steps is 5"
    longer = two_runs.ask("restart", "--from", "r-0002", "--set=train.steps=9", "--auto-restart=2")["start"]
    assert (longer["resume_from"]["run"], longer["resume_from"]["step"]) == ("r-0002", 6)
    seen = two_runs.ask("watch", "--every", "0.5")
    assert (seen["verdict"], seen["run"]) == ("finished", longer["run"])
    assert two_runs.ask("runs", "--limit", "1")["runs"][0]["step"] == 9
    again = two_runs.invoke("restart", "--from", longer["run"], "--set=train.steps=100000")
    assert f"from {longer['run']} step 9" in again and "tried again 2 times at most" in again
    two_runs.invoke("abort")
