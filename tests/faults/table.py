"""The faults that tests provoke, as one table: so that `docs/faults.md` says what was tried and nothing else.

    @fault("trainer killed by SIGKILL", promised="told in one look, resumed", seen="exit 4, `SIGKILL`")
    def test_…

A decorator gives one row; a test may carry several. What stands between backticks in `seen` must be a text of
the test's own file (an assertion's), or the table does not build. The part of the page follows from the
file's name; a test outside `tests/faults/` names it: `part="files"`. All are read from the source (literals).

`python -m tests.faults` writes the page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
PARTS = {
    "way": "The way to the container",
    "place": "The container and its disks",
    "process": "The processes",
    "files": "The files",
}

Test = TypeVar("Test", bound=Callable[..., object])


def fault(name: str, *, promised: str, seen: str, part: str | None = None) -> Callable[[Test], Test]:
    """Make the decorated test a row of the table; `part` is one of `PARTS`."""
    return lambda test: test


@dataclass(frozen=True)
class Row:
    """One line of the page; `test` is `file::function`, relative to the project's folder."""

    part: str
    name: str
    promised: str
    seen: str
    test: str


def rows(folder: Path = ROOT / "tests") -> list[Row]:
    """All rows, in the page's order. ValueError: a row that says what its test does not."""
    found = [row for path in sorted(folder.rglob("test_*.py")) for row in _rows_of(path, folder.parent)]
    return sorted(found, key=lambda row: list(PARTS).index(row.part))


def page(found: list[Row]) -> str:
    """The text of `docs/faults.md`."""
    tests = {row.test for row in found}
    lines = [
        "# Faults",
        "",
        "What was broken on purpose, what is promised, and what a person sees. Each row is a test of",
        "`make test` that provokes the fault for real and asserts what stands here. `python -m tests.faults`",
        "writes this page from the tests; do not edit it.",
        "",
        f"{len(found)} faults, {len(tests)} tests. What cannot be mended stands in the README under Limits.",
    ]
    for part, title in PARTS.items():
        lines += ["", f"## {title}", "", "| fault | promised | seen | test |", "|---|---|---|---|"]
        for row in found:
            if row.part == part:
                cells = [row.name, row.promised, row.seen, f"`{row.test}`"]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _rows_of(path: Path, root: Path) -> list[Row]:
    source = path.read_text("utf-8")
    if "@fault(" not in source:
        return []
    found, tree = [], ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "fault":
                found.append(_row(call, f"{path.relative_to(root).as_posix()}::{function.name}"))
    texts = _texts(tree)
    for row in found:
        for quoted in re.findall(r"`([^`]+)`", row.seen):
            if not any(quoted in text for text in texts):
                raise ValueError(f"{row.test} asserts nothing with the text {quoted!r}, but its row says so")
    return found


def _row(call: ast.Call, test: str) -> Row:
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    part = given.get("part") or next(
        (p for p in PARTS if test.startswith(f"tests/faults/test_faults_{p}")), None
    )
    if part not in PARTS:
        raise ValueError(f"{test}: name the part of the page, one of {', '.join(PARTS)}")
    return Row(part, ast.literal_eval(call.args[0]), given["promised"], given["seen"], test)


def _texts(tree: ast.Module) -> list[str]:
    """Every text of the file that is not part of a row itself."""
    own = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault"
        for inner in ast.walk(node)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own
    ]
