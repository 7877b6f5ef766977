"""When a verdict is worth a message, and what the message says: once a change, and no storm.

Pure, because two read it: `invoke watch --notify` here, and the notifier beside the run, to which this text
travels (controller/notify_program.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from controller import render
from controller.verdict import UNSENT, Verdict

Json = dict[str, Any]

SETTLE_S = (
    60.0  # a run is degraded for so long before it is told: a look in the middle of something is no news
)
END_S = 10.0  # an end that the supervisor has not written down yet: it will say how, within a moment
REARM_S = 600.0  # healthy for so long, and the next trouble is news again; a shorter recovery is flapping
LEAST_HIDDEN = 6  # characters: a shorter value is no token, and stands in many words
_ENDS = ("crashed", "finished", "stopped")
_TYPES = {"crashed": "failure", "stalled": "failure", "degraded": "warning", "finished": "success"}


class Changes:
    """What one run's watcher has seen and told. Times are seconds of a clock that does not jump."""

    def __init__(self, when: Iterable[str], known: str = "") -> None:
        """`known`: the word that whoever began to watch has seen; it is no news."""
        self._when, self._told = set(when), {known}
        self._word, self._since = known, 0.0

    def take(self, verdict: Verdict, snapshot: Json | None, now: float) -> bool:
        """Whether this verdict is to be told now."""
        word = verdict.word
        if word != self._word:
            self._word, self._since = word, now
        held = now - self._since
        if word == "healthy" and held >= REARM_S:
            self._told.clear()
        if word not in self._when or word in self._told or held < _settles(verdict, snapshot):
            return False
        self._told.add(word)
        return True


def _settles(verdict: Verdict, snapshot: Json | None) -> float:
    """Seconds for which a verdict must have held to be news."""
    if verdict.word == "degraded":
        return 0.0 if "restarting" in verdict.causes else SETTLE_S
    run = (snapshot or {}).get("run") or {}
    attended = any(each.get("role") == "supervisor" for each in run.get("processes") or [])
    return END_S if verdict.word in _ENDS and attended and not run.get("exit") else 0.0


def message(label: str, verdict: Verdict, snapshot: Json | None, hide: Iterable[str] = ()) -> Json:
    """`title`, `body` and `type` (apprise's: failure, warning, success or info) of one message.

    `hide`: values that must not leave, also where the trainer's own words, which a reason quotes, hold one.
    """
    run = ((snapshot or {}).get("run") or {}).get("id") or "no run"
    reasons = [reason for reason in verdict.reasons if not reason.startswith(UNSENT)]  # this one gets out
    lines = [verdict.summary, *(f"why   {reason}" for reason in reasons[:1])]
    lines.append(f"next  {render.next_step(verdict, snapshot)}")
    body = "\n".join(lines)
    for value in hide:
        body = body.replace(value, "…") if len(value) >= LEAST_HIDDEN else body
    return {
        "title": f"{label}  {run}  {verdict.word.upper()}",
        "body": body,
        "type": _TYPES.get(verdict.word, "info"),
    }
