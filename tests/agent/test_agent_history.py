"""Many runs in one answer, and which of them may go: facts for people who compare and people who tidy up."""

import json
import time

import pytest


def write(folder, name, value):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(value))


def past_run(box, run, *, created, checkpoint=None, resume_from=None, taus=()):
    """The remains of a run that has ended."""
    folder = box.run_dir(run)
    record = {
        "id": run,
        "created": created,
        "recipe": "tiny",
        "resume_from": resume_from,
        "env": {"KEY": "s3cret"},
    }
    write(folder, "run.json", record)
    write(folder, "exit.json", {"reason": "finished", "at": created + 100, "code": 0})
    if checkpoint is not None:
        write(folder / "checkpoints" / f"step-{checkpoint:06d}", "complete.json", {"step": checkpoint})
    lines = [
        {"step": n, "loss": 10 / n, "tokens": 100, "step_s": 0.5, "time": created + n, "compile": n == 1}
        for n in range(1, 101)
    ]
    for step, tau in taus:
        lines[step - 1]["tau"] = tau
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def five(box):
    """Five runs; the fourth resumes the second, the first is alone."""
    now = time.time()
    past_run(box, "r-0001", created=now - 500, checkpoint=10)
    second = past_run(box, "r-0002", created=now - 400, checkpoint=20, taus=[(50, 1.5), (100, 1.8)])
    past_run(box, "r-0003", created=now - 300, checkpoint=30)
    source = {"run": "r-0002", "step": 20, "path": str(second / "checkpoints" / "step-000020")}
    past_run(box, "r-0004", created=now - 200, resume_from=source)
    past_run(box, "r-0005", created=now - 100)
    return box


def test_the_newest_come_first_with_their_evaluations_and_without_secrets(five):
    result = five.call("runs", limit=4).result
    assert [each["id"] for each in result["runs"]] == ["r-0005", "r-0004", "r-0003", "r-0002"]
    assert result["total"] == 5
    found = result["runs"][3]
    assert [(each["step"], each["tau"]) for each in found["evaluations"]] == [(50, 1.5), (100, 1.8)]
    assert len(found["metrics"]) == 60 and found["metrics"][-1]["step"] == 100
    assert "s3cret" not in json.dumps(result)


def test_a_run_that_is_not_here_is_missing_and_no_error(five):
    result = five.call("runs", runs=["r-0009", "r-0001"]).result
    assert [each["id"] for each in result["runs"]] == ["r-0001"]
    assert result["missing"] == ["r-0009"]


def test_curves_are_means_of_a_bounded_number_of_points(five):
    [found] = five.call("runs", runs=["r-0002"], detail=True).result["runs"]
    curves = found["curves"]
    assert curves["lines"] == 100 and len(curves["steps"]) == 50
    assert (curves["first"], curves["steps"][0], curves["steps"][-1]) == (1, 2, 100)
    assert curves["loss"][0] == pytest.approx((10 + 5) / 2)
    assert curves["tokens_per_s"][0] == pytest.approx(200)  # the compile step is in no rate


def test_provenance_travels_only_when_it_is_not_there_already(ready):
    ready.start(recipe={"steps": 1})
    ready.wait_for(lambda: (ready.run_dir("r-0001") / "exit.json").exists(), "the run's end")
    [found] = ready.call("runs").result["runs"]
    place = found["provenance"]
    assert place["packages"]["pytest"] and len(place["environment"]) == 16
    assert place["machine"]["cpus"] >= 1
    key = f"r-0001@{found['record']['created']}"
    assert "provenance" not in ready.call("runs", without=[key]).result["runs"][0]


def test_the_release_tells_the_run_where_it_came_from(box):
    files = box.payload()
    dirty, clean = {"commit": "c" * 40, "dirty": "d" * 16}, {"commit": "e" * 40, "dirty": None}

    def source():
        manifest = json.loads((box.run_dir("x").parents[2] / "opt/current/manifest.json").read_text())
        return manifest["source"]

    box.deploy(files, source=dirty)
    assert source() == dirty
    box.deploy(files, source=clean)  # the same content, committed since
    assert source() == clean
    box.deploy(files, source=dirty)
    assert source() == clean


def test_prune_keeps_the_newest_the_pinned_and_what_a_kept_run_resumes(five):
    assert five.call("pin", run="r-0003", reason="the paper").result["changed"]
    seen = five.call("prune", keep=2).result
    assert [each["id"] for each in seen["doomed"]] == ["r-0001"]
    assert seen["kept"]["r-0003"] == "pinned"
    assert seen["kept"]["r-0002"] == "r-0004 resumes at its checkpoint"
    assert seen["removed"] == [] and five.run_dir("r-0001").exists()
    done = five.call("prune", keep=2, runs=["r-0001"]).result
    assert done["removed"] == ["r-0001"] and done["freed_bytes"] > 0
    assert not five.run_dir("r-0001").exists()
    assert five.call("prune", keep=2).result["doomed"] == []


def test_prune_never_takes_what_came_to_be_kept_meanwhile(five):
    five.call("pin", run="r-0001")
    refused = five.call("prune", keep=2, runs=["r-0001"]).error
    assert refused["kind"] == "usage" and "pinned" in refused["message"]
    assert five.run_dir("r-0001").exists()
    five.call("pin", run="r-0001", off=True)
    assert five.call("prune", keep=2, runs=["r-0001"]).result["removed"] == ["r-0001"]
    assert five.call("prune", keep=0).error["kind"] == "usage"


def test_prune_never_takes_a_living_run(ready):
    ready.start(recipe={"steps": 100000, "step_s": 0.05})
    for number in (2, 3):
        past_run(ready, f"r-000{number}", created=time.time())
    seen = ready.call("prune", keep=1).result
    assert seen["kept"]["r-0001"] == "alive"
    assert [each["id"] for each in seen["doomed"]] == ["r-0002"]


def test_the_release_of_a_pinned_run_stays_and_a_lost_one_is_named_by_its_commit(ready):
    source = {"commit": "c0ffee" * 7, "dirty": None}
    files = ready.payload(**{"first.txt": "1"})
    ready.deploy(files, source=source)
    for run in ("r-0001", "r-0002"):
        ready.start(recipe={"steps": 1}, resume="none")
        ready.wait_for(lambda run=run: (ready.run_dir(run) / "exit.json").exists(), "its end")
    release = ready.release_of(files)
    ready.call("pin", run="r-0001")
    for number in range(7):
        folder = ready.base / "opt" / "releases" / f"{number}abcdef0"
        folder.mkdir()
    ready.deploy(ready.payload(**{"second.txt": "2"}))
    assert (ready.base / "opt" / "releases" / release).is_dir()
    ready.call("pin", run="r-0001", off=True)
    ready.deploy(ready.payload(**{"third.txt": "3"}))
    assert not (ready.base / "opt" / "releases" / release).is_dir()
    refused = ready.call("start", like="r-0002", python=ready.python).error
    assert refused["kind"] == "no-release" and "c0ffeec0ffee" in refused["hint"]


def test_rollback_switches_back_and_forth_and_refuses_an_edited_release(box):
    old, new = box.payload(), box.payload(**{"note.txt": "new"})
    box.deploy(old)
    assert box.call("rollback").error["kind"] == "no-release"
    box.deploy(new)
    before = box.current()
    back = box.call("rollback").result
    assert (back["outcome"], back["release"], back["previous"]) == ("switched", box.release_of(old), before)
    assert box.current() == box.release_of(old)
    assert box.call("rollback").result["release"] == before
    named = box.call("rollback", release=box.release_of(old)[:6]).result
    assert named["outcome"] == "switched"
    assert box.call("rollback", release=box.release_of(old)).result["outcome"] == "unchanged"
    edited = box.base / "opt" / "releases" / before / "note.txt"
    edited.write_text("by hand")
    refused = box.call("rollback").error
    assert refused["kind"] == "verify" and "note.txt" in refused["message"]
    assert "there are, newest first" in box.call("rollback", release="zzzzzz").error["hint"]


def test_a_start_anew_says_that_the_finished_run_could_be_prolonged(ready):
    def told(**overrides):
        answer = ready.start(recipe={"steps": 4, "save_every": 2, **overrides})
        run = answer.result["run"]
        ready.wait_for(lambda: (ready.run_dir(run) / "exit.json").exists(), "the run's end")
        assert answer.result["resume_from"] is None
        return [note["text"] for note in answer.notes if "trains on" in note["text"]]

    assert told() == []
    [line] = told(**{"train.steps": 12})
    assert line == (
        "r-0001 has finished at step 4, this run begins anew "
        "(invoke restart --from r-0001 --set train.steps=12 trains on)"
    )
    assert told(**{"train.steps": 3}) == []  # it has trained longer than that
    assert told(**{"train.steps": 12, "train.lr": 1}) == []


def test_a_run_can_be_repeated_with_its_release_and_resumed(ready):
    ready.start(recipe={"steps": 4, "save_every": 2}, resume="none", auto_restart=2, backoff_s=0.5)
    ready.wait_for(lambda: (ready.run_dir("r-0001") / "exit.json").exists(), "the first run's end")
    first = ready.current()
    ready.deploy(ready.payload(**{"note.txt": "new"}))
    assert ready.current() != first
    again = ready.call("start", like="r-0001", overrides={"steps": 9}, python=ready.python).result
    record = ready.file(again["run"], "run.json")
    assert record["release"] == first
    assert record["overrides"]["steps"] == 9 and record["overrides"]["save_every"] == 2
    assert record["auto_restart"] == {"limit": 2, "backoff_s": 0.5}
    assert again["resume_from"] == {
        "run": "r-0001",
        "step": 4,
        "path": str(ready.run_dir("r-0001") / "checkpoints" / "step-000004"),
    }
    ready.wait_for(lambda: (ready.run_dir(again["run"]) / "exit.json").exists(), "the second run's end")
    refused = ready.call("start", like=again["run"], overrides={"steps": 8}, python=ready.python).error
    assert (refused["kind"], refused["message"]) == ("usage", "r-0002 stands at step 9, and train.steps is 8")
    assert "--set train.steps=18 trains on" in refused["hint"]
    over = ready.call("restart", like="newest", python=ready.python).error
    assert (over["kind"], over["message"]) == ("usage", "r-0002 has finished its 9 steps")
    assert over["hint"] == refused["hint"]
    wish = {"resume": "none", "release": "current", "auto_restart": 0}
    fresh = ready.call("start", like="r-0001", python=ready.python, **wish).result
    assert fresh["resume_from"] is None
    assert ready.file(fresh["run"], "run.json")["auto_restart"]["limit"] == 0
    assert ready.file(fresh["run"], "run.json")["release"] == ready.current()
