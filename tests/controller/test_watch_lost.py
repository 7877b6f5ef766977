"""A watch whose box does not answer: what it shows, how that grows old, and what is remembered of it."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller import history, watch, watch_looks, watch_lost, watch_view
from controller.console import Console
from controller.errors import Unreachable
from controller.inventory import Box
from controller.verdict import Verdict, judge
from controller.watch_state import Seen

SCREENS = Path(__file__).resolve().parent.parent / "golden" / "screens"


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((SCREENS / f"{name}.json").read_text("utf-8"))["snapshot"])


def part(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A whole look."""
    return {"snapshot": copy.deepcopy(snapshot), "curves": None, "evaluations": []}


def test_the_screen_while_nobody_answers(golden: Callable[[str, str], None]) -> None:
    seen = Seen()
    seen.take(part(recorded("healthy")))
    error = Unreachable("pve1 has given no sign of life for 20 s", "look after the way to it")
    screens = []
    for age_s, left_s in ((25.0, 5.0), (400.0, 0.2)):
        lost = watch_lost.verdict(error, "healthy", seen, age_s, left_s)
        old = watch_lost.grown_old(seen, age_s)
        screens.append(watch_view.screen("lab/200", lost, old, width=100, height=38))
    golden("screens/watch-unreachable.txt", "\n\n".join(screens))
    assert judge(seen.snapshot).word == "healthy"  # what was seen is as it was


class Shown:
    """A view that remembers what it was to show."""

    def __init__(self) -> None:
        self.told: list[tuple[Verdict, Seen]] = []

    def show(self, label: str, verdict: Verdict, seen: Seen) -> None:
        self.told.append((verdict, seen))

    def close(self) -> None:
        pass


def test_the_age_of_what_was_seen_goes_on_while_an_attempt_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_lost, "_EVERY_S", 0.01)
    seen, view = Seen(), Shown()
    seen.take(part(recorded("healthy")))
    seen.at -= 100
    lost = watch_lost.Lost(view, "lab/200")
    lost.begin(Unreachable("gone"), "healthy", seen, 0.0)
    ends = time.monotonic() + 900
    while len(view.told) < 4:
        assert time.monotonic() < ends
        time.sleep(0.01)
    lost.end()
    told = list(view.told)
    ages = [found.last["age_s"] for found, _ in told if found.last]
    assert len(ages) == len(told) and 100 <= ages[0] < ages[-1]
    assert all(found.summary.startswith("last seen healthy ") for found, _ in told)
    assert seen.snapshot is not None
    now = seen.snapshot["now"]
    assert [old.snapshot["now"] - now for _, old in told if old.snapshot] == pytest.approx(ages)
    time.sleep(0.1)
    assert view.told == told


def test_a_box_that_is_gone_is_not_remembered_anew_by_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` beside the watch tells the age of the last look."""
    remembered, attempts = [], []

    def call(*_: Any, on_part: Callable[[dict[str, Any]], None], **__: Any) -> None:
        attempts.append(on_part)
        if len(attempts) == 5:
            raise KeyboardInterrupt
        if len(attempts) in (1, 3):
            on_part(part(recorded("healthy")))
        raise Unreachable("gone")

    monkeypatch.setattr(watch_looks, "call", call)
    monkeypatch.setattr(watch, "RETRY_S", (0.0,))
    monkeypatch.setattr(history, "remember", lambda _, run, word: remembered.append((run["id"], word)))
    with pytest.raises(KeyboardInterrupt):
        watch.run(Box(name="lab", host="pve1", vmid=200, recipe="r"), Console(), capture=True)
    assert remembered == [(recorded("healthy")["run"]["id"], "healthy")] * 2
