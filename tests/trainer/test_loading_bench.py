"""The benchmark of the cold start runs whole where there is no GPU and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import loading


def test_it_runs_whole_at_a_small_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loading.main(["--small", "--layers", "4", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "all sections ran" in said
    assert "target loaded" in said and "GiB/s" in said
    assert not list(tmp_path.iterdir())
