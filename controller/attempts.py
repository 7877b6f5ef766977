"""What a run's restarts after crashes say: how often, why the last time, when again, or why not."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from controller import words

Json = dict[str, Any]

_SAYS = 110  # characters of an exception: two lines of the screen with what stands before it


def limit(run: Json) -> int:
    """How many restarts the run was given; 0 without any."""
    wish = (run.get("record") or {}).get("auto_restart")
    return int(wish.get("limit") or 0) if isinstance(wish, dict) else 0


def restarted(run: Json) -> int:
    """How often it was started again after a crash."""
    return int((run.get("attempts") or {}).get("restarted") or 0)


def pending(run: Json) -> Json | None:
    """The crash that is going to be tried again and has not been yet."""
    told = run.get("attempts") or {}
    crashes = told.get("crashes") or []
    waits = crashes and crashes[-1].get("again_at") and len(crashes) > restarted(run)
    return dict(crashes[-1]) if waits else None


def again(run: Json, crash: Json, now: float) -> str:
    """The headline of a pause: `crashed at step 40, starts again in 25s (restart 2 of 3)`."""
    left = crash["again_at"] - now
    when = f"in {words.duration(left)}" if left >= 1 else "now"
    return f"crashed{_at(crash)}, starts again {when} (restart {restarted(run) + 1} of {limit(run)})"


def so_far(run: Json, now: float) -> Iterator[str]:
    """One line on a run that was restarted: how often, and the last crash."""
    told = run.get("attempts") or {}
    crashes, number = told.get("crashes") or [], restarted(run)
    if not number or len(crashes) < number:
        return
    last = crashes[number - 1]
    age = f" {words.age(max(0.0, now - last['at']))} ago" if last.get("at") else ""
    times = f"{number} of {int(told.get('limit') or 0)} times"
    yield f"restarted {times}, last crash{age}{_at(last)}: {says(last)}"


def cut_short(run: Json) -> Iterator[str]:
    """The crash of a run that an operator stopped before it was tried again."""
    crash = pending(run)
    if crash is not None:
        yield f"it had crashed{_at(crash)}: {says(crash)}"


def given_up(run: Json) -> Iterator[str]:
    """Why a crash was not tried again, where that was asked for."""
    told = run.get("attempts") or {}
    if told.get("given_up"):
        times = f"restarted {restarted(run)} of {int(told.get('limit') or 0)} times"
        yield f"{times}, not tried again: {told['given_up']}"


def line(crash: Json) -> str:
    """One crash and what followed, for a list of them."""
    resume = crash.get("resume")
    then = f", went on from step {int(resume['step'])}" if resume else ""
    at = datetime.datetime.fromtimestamp(crash.get("at") or 0, datetime.UTC)
    return f"{at:%b %d %H:%M}{_at(crash)}: {says(crash)}{then}"


def says(crash: Json) -> str:
    text = str(crash.get("says") or crash.get("signal") or "?")
    return text if len(text) <= _SAYS else f"{text[: _SAYS - 1]}…"


def _at(crash: Json) -> str:
    step = crash.get("step")
    return " before its first state" if step is None else f" at step {int(step)}"
