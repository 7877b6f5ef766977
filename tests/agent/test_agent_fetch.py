"""A checkpoint goes out whole or from a byte, with the right hash, and the right one is chosen."""

import hashlib
import json
import os

import pytest

from tests.faults.table import fault


@pytest.fixture
def trained(box):
    """A box with one run of three checkpoints, of which the middle one is the best."""
    folder = box.run_dir("r-0001")
    for step in (20, 40, 60):
        place = folder / "checkpoints" / f"step-{step:06d}"
        place.mkdir(parents=True)
        (place / "complete.json").write_text(json.dumps({"step": step}))
        (place / "model.safetensors").write_bytes(os.urandom(3_000_000))
    taus = {20: 1.4, 40: 1.9, 60: 1.7}
    lines = [{"step": step, "loss": 3.0, "tau": taus.get(step)} for step in range(1, 61)]
    lines = [{key: value for key, value in line.items() if value is not None} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return box


def parts(answer):
    """The bytes of each file, cut from the one stream as the list of files says."""
    found, at = {}, 0
    for file in answer.part[0]["files"]:
        size = file["bytes"] - file["from"]
        found[file["path"]] = answer.out[at : at + size]
        at += size
    assert at == len(answer.out)
    return found


def test_the_last_checkpoint_arrives_with_its_hashes(trained):
    answer = trained.call("fetch")
    assert (answer.result["source"], answer.result["step"]) == ("r-0001/checkpoints/step-000060", 60)
    assert answer.result["tau"] == 1.7
    found = parts(answer)
    assert sorted(found) == ["complete.json", "model.safetensors"]
    for file in answer.result["files"]:
        assert file["sha256"] == hashlib.sha256(found[file["path"]]).hexdigest()


@pytest.mark.parametrize(("what", "step"), [("best", 40), ("last", 60), ("20", 20), ("auto", 60)])
def test_the_checkpoint_that_was_meant(trained, what, step):
    assert trained.call("fetch", run="r-0001", what=what).result["step"] == step


def test_an_export_comes_first_when_there_is_one(trained):
    export = trained.run_dir("r-0001") / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    (trained.run_dir("r-0001") / "state.json").write_text(
        json.dumps({"phase": "finished", "step": 70, "tau": 2.5, "heartbeat": 5.0})
    )
    answer = trained.call("fetch")
    assert (answer.result["source"], answer.result["tau"]) == ("r-0001/export", 2.5)
    assert parts(answer) == {"config.json": b"{}"}


def test_it_goes_on_at_the_byte_that_is_there_only_for_the_same_file(trained):
    listed = trained.call("fetch").part[0]
    whole = parts(trained.call("fetch"))["model.safetensors"]
    [model] = [file for file in listed["files"] if file["path"] == "model.safetensors"]
    have = {listed["source"]: {"model.safetensors": {**model, "got": 2_999_000}}}
    answer = trained.call("fetch", have=have)
    assert parts(answer)["model.safetensors"] == whole[2_999_000:]
    sent = {file["path"]: file for file in answer.result["files"]}
    assert sent["model.safetensors"]["sha256"] == hashlib.sha256(whole).hexdigest()
    have[listed["source"]]["model.safetensors"]["mtime_ns"] += 1
    assert parts(trained.call("fetch", have=have))["model.safetensors"] == whole


def test_a_checkpoint_that_is_retired_meanwhile_arrives_whole(trained):
    process = trained.begin("fetch", {"what": "20"})
    kind, data = trained.next_frame(process)
    assert kind == "part"
    place = trained.run_dir("r-0001") / "checkpoints" / "step-000020"
    kept = (place / "model.safetensors").read_bytes()
    for path in place.iterdir():
        path.unlink()
    answer = trained.collect(process)
    sent = {file["path"]: file["sha256"] for file in answer.result["files"]}
    assert sent["model.safetensors"] == hashlib.sha256(kept).hexdigest()
    assert len(answer.out) == sum(file["bytes"] for file in json.loads(data)["files"])


def test_refusals_say_what_there_is(trained):
    assert trained.call("fetch", run="r-0009").error["kind"] == "no-run"
    wrong = trained.call("fetch", what="41").error
    assert "one of 20, 40, 60" in wrong["hint"]
    assert "no export" in trained.call("fetch", what="export").error["message"]
    (trained.run_dir("r-0001") / "metrics.jsonl").write_text("")
    none = trained.call("fetch", what="best").error
    assert "was evaluated" in none["message"] and "kept: 20, 40, 60" in none["message"]
    empty = trained.run_dir("r-0002")
    empty.mkdir()
    source = {"run": "r-0001", "step": 60, "path": str(trained.run_dir("r-0001") / "checkpoints/step-000060")}
    (empty / "run.json").write_text(json.dumps({"resume_from": source}))
    assert trained.call("fetch").error["hint"] == "it stands on r-0001: invoke fetch r-0001"


@fault(
    "one bit of a checkpoint that is fetched has flipped on the container's disk",
    promised="it does not arrive as a checkpoint; which file it is, and what to fetch instead",
    seen="exit 9: `is damaged in the container: the checksum of model.safetensors differs`",
    part="files",
)
def test_what_is_not_what_the_trainer_wrote_does_not_count_as_fetched(trained):
    place = trained.run_dir("r-0001") / "checkpoints" / "step-000060"
    written = (place / "model.safetensors").read_bytes()
    facts = {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    proof = {"step": 60, "files": {"model.safetensors": facts}}
    (place / "complete.json").write_text(json.dumps(proof))
    assert trained.call("fetch").result["step"] == 60
    (place / "model.safetensors").write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    error = trained.call("fetch").error
    assert error["kind"] == "verify"
    assert "is damaged in the container: the checksum of model.safetensors differs" in error["message"]
