"""The runs of a box as people compare them: from the container, and from memory where it has them no more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controller import attempts, mirror, progress, words
from controller.call import call
from controller.console import Console
from controller.deadline import Deadline
from controller.errors import NotRunning, Unreachable
from controller.inventory import Box
from controller.verdict import Verdict, judge

Json = dict[str, Any]

_LOOK = Deadline(total=120.0)
_SAME_LOOK_S = 5.0
NEWEST = "newest"  # stands for a run's id
SMOOTH = 20  # steps over which a loss is averaged: one step's is noise


@dataclass(frozen=True)
class History:
    """Entries as the agent's `runs` gives them; one from memory has `seen_at`. `now`: the container's clock.

    `why`: what kept us from looking, or empty.
    """

    entries: list[Json]
    now: float | None
    total: int
    why: str = ""


@dataclass(frozen=True)
class Figures:
    """What came of a run. Loss: mean of its last `loss_steps` steps, SMOOTH where it made as many; the last
    one's is what `status` shows. Rates: steady steps at its end. τ as evaluated."""

    step: int
    steps: int
    tokens_per_s: float | None
    step_s: float | None
    loss: float | None
    loss_steps: int
    last_loss: float | None
    tau: float | None
    best_tau: float | None
    best_step: int | None
    seconds: float | None
    word: str


def args(ids: Sequence[str] = (), *, limit: int = 20, detail: bool = False, points: int = 64) -> Json:
    return {"runs": list(ids), "limit": limit, "detail": detail, "points": points}


def look(
    box: Box, ids: Sequence[str] = (), *, limit: int = 20, detail: bool = False, points: int = 64
) -> History:
    """The named runs, each once, else the newest `limit` (0: all), newest first; what is seen is remembered.

    A box that cannot be reached is answered from memory, if there is any. Raises NotRunning for a run that
    neither knows, and what kept us from looking. `points`: rows of the curves that `detail` adds.
    """
    remembered = mirror.read(box)
    wishes = {**args(ids, limit=limit, detail=detail, points=points), "without": _known(remembered)}
    try:
        answer = call(box, "runs", wishes, deadline=_LOOK)
    except (Unreachable, NotRunning) as error:
        newest = remembered[0]["id"] if remembered else NEWEST
        wanted = dict.fromkeys(newest if each == NEWEST else each for each in ids)
        known = [_recall(run_id, remembered) for run_id in wanted] if ids else remembered[: limit or None]
        found = [entry for entry in known if entry is not None]
        if not found or len(found) < len(wanted):
            raise
        return History(found, None, len(remembered), error.message)
    mirror.keep(box, answer["runs"])
    by_id = {str(entry["id"]): _completed(entry, remembered) for entry in answer["runs"]}
    if not ids:
        return History(list(by_id.values()), answer["now"], answer["total"])
    found = []
    for run_id in dict.fromkeys(answer["newest"] if each == NEWEST else each for each in ids):
        entry = by_id.get(run_id) or _recall(run_id, remembered)
        if entry is None:
            raise NotRunning(f"there is no run {run_id or 'yet'}", "invoke runs lists them", kind="no-run")
        found.append(entry)
    return History(found, answer["now"], answer["total"])


def tell(found: History, console: Console) -> None:
    """Say what comes from memory, and why."""
    if found.why:
        console.note(f"{found.why}; what follows is from memory")
        return
    for entry in found.entries:
        if entry.get("seen_at"):
            age = words.age(time.time() - entry["seen_at"])
            gone = f"{entry['id']} is in the container no more"
            console.note(f"{gone}: what is said of it is from memory, as it was {age} ago")


def _known(remembered: list[Json]) -> list[str]:
    """`id@created` of the runs whose provenance is here: it never changes, so it need not travel again."""
    return [f"{each['id']}@{each['record']['created']}" for each in remembered if each.get("provenance")]


def _completed(entry: Json, remembered: list[Json]) -> Json:
    """With the provenance that did not travel because it is here."""
    if "provenance" in entry:
        return entry
    created = (entry.get("record") or {}).get("created")
    same = (each for each in remembered if each["id"] == entry["id"] and each["record"]["created"] == created)
    return {**entry, "provenance": next((each.get("provenance") for each in same), None)}


def _recall(run_id: str, remembered: list[Json]) -> Json | None:
    return next((each for each in remembered if each["id"] == run_id), None)


def remember(box: Box, run: Json, word: str) -> None:
    """Keep what a snapshot says of its run and the verdict on it, without its log and its environment."""
    record = {key: value for key, value in (run.get("record") or {}).items() if key not in ("env", "argv")}
    kept = ("id", "state", "exit", "stop", "attempts", "processes", "checkpoints")
    entry = {**{key: run.get(key) for key in kept}, "record": record}
    entry["verdict"] = {"word": word, "at": time.time()}
    mirror.keep(box, [{**entry, "metrics": (run.get("metrics") or [])[-progress.WINDOW :]}])


def last_seen(box: Box) -> Json | None:
    """`word run step age_s` of the newest run that was seen, by this machine's clock alone; None without."""
    newest = next(iter(mirror.read(box)), None)
    if newest is None:
        return None
    seen_at, judged = newest["seen_at"], newest.get("verdict") or {}
    fresh = judged.get("at", 0.0) >= seen_at - _SAME_LOOK_S  # a later look may have been at the records alone
    return {
        "word": judged["word"] if fresh else verdict_of(newest, None).word,
        "run": newest["id"],
        "step": progress.of(newest).step,
        "age_s": max(0.0, time.time() - seen_at),
    }


def verdict_of(entry: Json, now: float | None) -> Verdict:
    """The verdict on one entry; on one from memory, the verdict of when it was seen."""
    state, record = entry.get("state") or {}, entry.get("record") or {}
    if now is None or entry.get("seen_at"):
        now = state.get("heartbeat") or record.get("created") or 0.0
    return judge({"now": now, "run": entry})


def figures(entry: Json, now: float | None) -> Figures:
    pace, record = progress.of(entry), entry.get("record") or {}
    losses = [line["loss"] for line in attempts.kept(entry) if line.get("loss") is not None][-SMOOTH:]
    if not losses and pace.loss is not None:
        losses = [pace.loss]  # the lines are lost, the state knows the last step's
    evaluated = entry.get("evaluations") or []
    best = max(evaluated, key=lambda each: (each["tau"], each["step"]), default=None)
    state = entry.get("state") or {}
    ended = (entry.get("exit") or {}).get("at") or (
        None if entry.get("processes") else state.get("heartbeat")
    )
    until = ended or (state.get("heartbeat") if entry.get("seen_at") else now)
    created = record.get("created")
    return Figures(
        step=pace.step,
        steps=pace.steps,
        tokens_per_s=pace.tokens_per_s,
        step_s=pace.step_s,
        loss=statistics.fmean(losses) if losses else None,
        loss_steps=len(losses),
        last_loss=pace.loss,
        tau=evaluated[-1]["tau"] if evaluated else pace.tau,
        best_tau=best["tau"] if best else None,
        best_step=int(best["step"]) if best else None,
        seconds=until - created if until and created else None,
        word=verdict_of(entry, now).word,
    )
