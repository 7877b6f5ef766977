"""A drafter comes here whole: across cuts, after a kill, over damage, and never over other files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller import fetch, incoming
from controller.console import Console
from controller.errors import PctrunError, ProtocolError, Unreachable, Usage
from controller.execution import execute
from controller.inventory import Box
from tests.faults.table import fault

from .conftest import Proxy

FOLDER = "/var/lib/pctrun/runs"
RUN = "r-7300"
WEIGHTS = os.urandom(12 << 20)


def in_container(box: Box, script: str, stdin: bytes | None = None) -> None:
    result = execute(box, ["sh", "-c", script], stdin=stdin)
    assert result.code == 0, result.stderr


@pytest.fixture
def trained(box: Box) -> Iterator[Box]:
    """A run with one checkpoint of 12 MiB."""
    place = f"{FOLDER}/{RUN}/checkpoints/step-000120"
    in_container(box, f"mkdir -p {place} && cat > {place}/model.safetensors", WEIGHTS)
    in_container(box, f"cat > {place}/complete.json", b'{"step": 120}')
    in_container(box, f"cat > {FOLDER}/{RUN}/run.json", b'{"recipe": "mine", "overrides": {"train.lr": 1}}')
    yield box
    in_container(box, f"rm -rf {FOLDER}/{RUN}")


def assert_whole(out: Path) -> dict[str, object]:
    [folder] = list(out.iterdir())
    assert folder.name == f"{RUN}-step-000120"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    label: dict[str, object] = json.loads((folder / "pctrun.json").read_text())
    assert label["step"] == 120
    return label


def test_it_lands_whole_with_a_label_and_a_second_time_nothing_travels(trained: Box, tmp_path: Path) -> None:
    got = fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))
    assert got.text.startswith(f"fetched {tmp_path}/{RUN}-step-000120: {RUN} step 120, 2 files 12.0 MiB in ")
    label = assert_whole(tmp_path)
    assert label["box"] == "sandbox"
    made_by = {"recipe": "mine", "overrides": {"train.lr": 1}, "release": None, "config_hash": None}
    assert label["made_by"] == made_by
    [weights] = [f for f in got.document["files"] if f["path"] == "model.safetensors"]
    assert weights["sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    again = fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))
    assert again.document["sent_bytes"] == 0
    assert again.text.startswith("unchanged ")


@fault(
    "SSH cut twice in a fetch",
    promised="only what was in flight travels again",
    seen="exit 0; no byte travelled twice; every file by its hash",
    part="way",
)
def test_a_cut_line_costs_only_what_was_in_flight(
    trained: Box, real_box: Callable[..., Box], proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "RETRY_S", (0.1,) * 5)
    take, cuts = incoming.Incoming.take, [2 << 20, 7 << 20]

    def cut_twice(self: incoming.Incoming, data: bytes) -> None:
        take(self, data)
        if cuts and self.received > cuts[0]:
            cuts.pop(0)
            proxy.cut()

    monkeypatch.setattr(incoming.Incoming, "take", cut_twice)
    got = fetch.run(real_box(port=proxy.port), Console(), run_id=RUN, out=str(tmp_path))
    assert not cuts
    assert got.document["sent_bytes"] == got.document["bytes"]  # no byte travelled twice
    assert_whole(tmp_path)


def die_half_way(box: Box, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch whose process ends after 5 MiB."""
    take = incoming.Incoming.take

    def take_and_die(self: incoming.Incoming, data: bytes) -> None:
        take(self, data)
        if self.received > 5 << 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(incoming.Incoming, "take", take_and_die)
        fetch.run(box, Console(), run_id=RUN, out=str(out))


@fault(
    "fetch killed half-way",
    promised="a new one goes on there; nothing half-made under the final name",
    seen="only `.part` lies here; `of it now`; every file by its hash",
    part="way",
)
def test_a_new_process_goes_on_where_the_killed_one_was(
    trained: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_half_way(trained, tmp_path, monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == [f".{RUN}-step-000120.part"]
    got = fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))
    assert got.document["sent_bytes"] < 7.1 * (1 << 20)
    assert "of it now" in got.text
    assert_whole(tmp_path)


def test_damage_in_what_was_there_already_is_found_and_mended(
    trained: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_half_way(trained, tmp_path, monkeypatch)
    part = tmp_path / f".{RUN}-step-000120.part" / "model.safetensors"
    with part.open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))
    assert_whole(tmp_path)


def test_what_lies_in_the_way_is_never_touched(trained: Box, tmp_path: Path) -> None:
    mine = tmp_path / f"{RUN}-step-000120"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(Usage, match="is here already"):
        fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_a_fetched_file_that_was_changed_is_refused_and_kept(trained: Box, tmp_path: Path) -> None:
    fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))
    weights = tmp_path / f"{RUN}-step-000120" / "model.safetensors"
    weights.write_bytes(b"x" * len(WEIGHTS))
    with pytest.raises(Usage, match="is here already"):
        fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))
    assert weights.read_bytes() == b"x" * len(WEIGHTS)


def test_no_room_is_said_before_anything_travels(
    trained: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming.shutil, "disk_usage", lambda path: _Usage())
    with pytest.raises(PctrunError, match="MiB are to come"):
        fetch.run(trained, Console(), run_id=RUN, out=str(tmp_path))


class _Usage:
    free = 1000


@fault(
    "SSH dead for good in a fetch",
    promised="given up after five tries; what has arrived stays",
    seen="exit 7; `.part` stays",
    part="way",
)
def test_a_line_that_stays_dead_is_unreachable_and_leaves_the_part(
    trained: Box, real_box: Callable[..., Box], proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "RETRY_S", (0.05, 0.05))
    take = incoming.Incoming.take

    def cut_for_good(self: incoming.Incoming, data: bytes) -> None:
        take(self, data)
        if self.received > 5 << 20:
            proxy.refuse()

    monkeypatch.setattr(incoming.Incoming, "take", cut_for_good)
    with pytest.raises(Unreachable):
        fetch.run(real_box(port=proxy.port), Console(), run_id=RUN, out=str(tmp_path))
    assert (tmp_path / f".{RUN}-step-000120.part" / "model.safetensors").stat().st_size > 4 << 20


def test_a_host_that_never_answers_is_not_tried_for_minutes(
    real_box: Callable[..., Box], tmp_path: Path
) -> None:
    with pytest.raises(Unreachable):
        fetch.run(real_box(port=1), Console(), run_id=RUN, out=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "", "a//b", "pctrun.json"])
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(ProtocolError):
        incoming._plain(path)


def test_the_usual_place_is_none_that_git_shows(
    trained: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    got = fetch.run(trained, Console(), run_id=RUN)
    assert got.document["path"] == f"drafters/{RUN}-step-000120"
    assert (tmp_path / "drafters" / f"{RUN}-step-000120" / "model.safetensors").read_bytes() == WEIGHTS
    shown = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert shown.stdout == ""
