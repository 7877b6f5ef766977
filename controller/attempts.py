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


def alive(run: Json, role: str) -> Json | None:
    """The run's process in this role; one that has ended and is not reaped is none."""
    for process in run.get("processes") or []:
        if process.get("role") == role and str(process.get("state", ""))[:1] not in ("Z", "X"):
            return dict(process)
    return None


def state(run: Json) -> Json:
    """What the present attempt says of itself: until its first word, the state is that of the dead one."""
    told: Json = run.get("state") or {}
    attended = restarted(run) and alive(run, "supervisor") and alive(run, "trainer")
    pid = told.get("pid")
    if attended and pid is not None and all(each.get("pid") != pid for each in run["processes"]):
        return {"steps": told.get("steps"), "phase_since": _crash(run).get("again_at")}
    return told


def between(run: Json) -> bool:
    """Whether no attempt is at work, though the supervisor is going to begin another one."""
    if run.get("exit") or not alive(run, "supervisor"):
        return False
    ended = (run.get("state") or {}).get("phase") in ("finished", "stopped")
    return bool(pending(run) or (limit(run) and not ended and not alive(run, "trainer")))


def steps(run: Json) -> tuple[int, list[Json]]:
    """The step that the last attempt goes on from, and the newest metrics lines that are its own.

    The lines beyond that step are a dead attempt's until the new one has taken them back, which it does
    before it warms up. It may pass over a damaged checkpoint: then the time tells which lines are its own.
    """
    lines, number, last = run.get("metrics") or [], restarted(run), _crash(run)
    place = last.get("resume") or (run.get("record") or {}).get("resume_from") or {}
    began, at = int(place.get("step") or 0), last.get("at")
    if not number:
        return began, lines
    if state(run).get("phase") in (None, "starting"):
        return began, []
    return began, [
        line for line in lines if line["step"] > began or (at is not None and (line.get("time") or 0) > at)
    ]


def kept(run: Json) -> list[Json]:
    """The newest metrics lines without those that a dead attempt made beyond the checkpoint gone on from."""
    began, own = steps(run)
    mine = {id(line) for line in own}
    return [line for line in run.get("metrics") or [] if line["step"] <= began or id(line) in mine]


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


def _crash(run: Json) -> Json:
    """The one that the present attempt followed; empty in a first attempt."""
    crashes = ((run.get("attempts") or {}).get("crashes") or [])[: restarted(run)]
    return dict(crashes[-1]) if crashes else {}


def _at(crash: Json) -> str:
    step = crash.get("step")
    return " before its first state" if step is None else f" at step {int(step)}"
