"""What a watcher knows: the last whole look, with everything new since put where a snapshot has it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from controller.sparkline import Point

Json = dict[str, Any]

METRICS, TAIL, CURVE = 200, 400, 4000  # lines and points that are kept


@dataclass
class Seen:
    """`snapshot` is shaped as the agent's, so that the same verdict and screen serve it. `at`: when the last
    part came, by this machine's clock."""

    snapshot: Json | None = None
    loss: deque[Point] = field(default_factory=lambda: deque(maxlen=CURVE))
    rate: deque[Point] = field(default_factory=lambda: deque(maxlen=CURVE))
    tau: deque[Point] = field(default_factory=lambda: deque(maxlen=CURVE))
    looks: int = 0
    at: float = 0.0
    _after_whole: bool = False

    def take(self, part: Json) -> None:
        """One `part` of the agent's watch, whole or new."""
        self.looks, self.at = self.looks + 1, time.time()
        if "snapshot" in part:
            self._take_whole(part)
        elif self.snapshot is not None and self.snapshot.get("run"):
            self._take_new(part["new"], self.snapshot, self.snapshot["run"])
            self._after_whole = False

    def _take_whole(self, part: Json) -> None:
        self.snapshot, self._after_whole = part["snapshot"], True
        for curve in (self.loss, self.rate, self.tau):
            curve.clear()
        curves = part.get("curves") or {}
        steps = curves.get("steps") or []
        for curve, values in ((self.loss, curves.get("loss")), (self.rate, curves.get("tokens_per_s"))):
            pairs = zip(steps, values or [], strict=False)
            curve.extend((step, value) for step, value in pairs if value is not None)
        self.tau.extend((each["step"], each["tau"]) for each in part.get("evaluations") or [])

    def _take_new(self, new: Json, snapshot: Json, run: Json) -> None:
        told = new["run"]
        snapshot.update({key: value for key, value in new.items() if key != "run"})
        run.update({key: value for key, value in told.items() if key not in ("metrics", "log")})
        fresh = told["metrics"]
        if fresh:
            self._forget_from(run, fresh[0]["step"])
        run["metrics"] = [*(run.get("metrics") or []), *fresh][-METRICS:]
        for line in fresh:
            self._add(line)
        self._take_log(run, told["log"])

    def _forget_from(self, run: Json, first: float) -> None:
        """Steps told again take the place of the known ones: another attempt makes them anew."""
        run["metrics"] = [line for line in run.get("metrics") or [] if line["step"] < first]
        for curve in (self.loss, self.rate, self.tau):
            while curve and curve[-1][0] >= first:
                curve.pop()

    def _add(self, line: Json) -> None:
        step = line["step"]
        if line.get("loss") is not None:
            self.loss.append((step, line["loss"]))
        if line.get("step_s") and not line.get("compile"):
            self.rate.append((step, (line.get("tokens") or 0) / line["step_s"]))
        if line.get("tau") is not None:
            self.tau.append((step, line["tau"]))

    def _take_log(self, run: Json, told: Json | None) -> None:
        if told is None:
            run["log"] = None
            return
        log = run.get("log") or {"tail": [], "traceback": []}
        tail, fresh = log["tail"], told["tail"]
        if self._after_whole:  # the first new lines may have been in the whole look already
            fresh = fresh[_overlap(tail, fresh) :]
        run["log"] = {**log, **told, "tail": [*tail, *fresh][-TAIL:]}


def _overlap(tail: list[str], fresh: list[str]) -> int:
    """How many of the first `fresh` lines are the last of `tail`."""
    for count in range(min(len(tail), len(fresh)), 0, -1):
        if tail[-count:] == fresh[:count]:
            return count
    return 0
