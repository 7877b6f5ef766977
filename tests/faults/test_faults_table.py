"""`docs/faults.md` is what the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.table import PAGE, page, rows


def test_the_page_is_up_to_date() -> None:
    """Mend: `python -m tests.faults`."""
    assert PAGE.read_text("utf-8") == page(rows())


def test_a_row_that_its_test_does_not_prove_is_refused(tmp_path: Path) -> None:
    test = tmp_path / "tests" / "faults" / "test_faults_way_x.py"
    test.parent.mkdir(parents=True)
    row = '@fault("a cut", promised="all", seen="`the very words`")\n'
    test.write_text(f"{row}def test_a():\n    assert 'the very words' in said\n")
    assert [(r.part, r.name, r.test) for r in rows(tmp_path / "tests")] == [
        ("way", "a cut", "tests/faults/test_faults_way_x.py::test_a")
    ]
    test.write_text(f"{row}def test_a():\n    assert 'other words' in said\n")
    with pytest.raises(ValueError, match="the very words"):
        rows(tmp_path / "tests")
