"""Which side waits for the other, and which split of the same devices would be faster: arithmetic on
measured times, without torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

STARVES = 0.10  # share of its time that a side waits before it counts as starving
WORTH = 0.03  # a split must promise this much more speed before it is advised


@dataclass(frozen=True)
class Costs:
    """Seconds of one device: `target_row`, `drafter_row` for a row on each side; `drafter_step` once a step
    on every drafter (gradients between the drafters, optimizer)."""

    target_row: float
    drafter_row: float
    drafter_step: float = 0.0

    def row(self, targets: int, drafters: int, rows_per_step: int) -> float:
        """Seconds a row with the slower side working all the time; the unluckiest drafter decides a step."""
        turns = math.ceil(rows_per_step / drafters)
        drafting = (turns * self.drafter_row + self.drafter_step) / rows_per_step
        return max(self.target_row / targets, drafting)


def best_split(costs: Costs, devices: int, rows_per_step: int) -> tuple[int, int]:
    """(targets, drafters) with the most rows a second over `devices` devices; fewest drafters among equals.

    No more drafters than rows in a step: they would idle. One device carries both.
    """
    if devices < 2:
        return 1, 1
    splits = [(devices - d, d) for d in range(1, min(rows_per_step, devices - 1) + 1)]
    return min(splits, key=lambda split: costs.row(*split, rows_per_step))


@dataclass(frozen=True)
class Balance:
    """`wait`: share of their time that the sides wait, over their threads' mean. `advice` is the better split
    of the same devices and `gain` what it promises (0.12: 12 % more rows a second), or None and 0."""

    split: str
    starving: str | None
    wait: dict[str, float]
    row_s: dict[str, float]
    advice: str | None
    gain: float

    def as_state(self) -> dict[str, Any]:
        """`pipeline` of state.json."""
        return asdict(self)


def judge(
    split: tuple[int, int], busy: dict[str, float], costs: Costs | None, rows_per_step: int, *, apart: bool
) -> Balance:
    """`busy`: share by thread (target-0, drafter-0, …). `apart`: every thread has a device of its own; where
    they share one, each slows the other and the times say nothing about another split."""
    wait = {side: _wait(busy, side) for side in ("targets", "drafters")}
    hungrier = max(wait, key=lambda side: wait[side])
    starving = hungrier if wait[hungrier] >= STARVES else None
    advice, gain = None, 0.0
    if costs is not None and apart:
        best = best_split(costs, sum(split), rows_per_step)
        now, then = costs.row(*split, rows_per_step), costs.row(*best, rows_per_step)
        if best != split and now / then - 1 >= WORTH:
            advice, gain = f"{best[0]}:{best[1]}", now / then - 1
    return Balance(
        split=f"{split[0]}:{split[1]}",
        starving=starving,
        wait={side: round(share, 3) for side, share in wait.items()},
        row_s={}
        if costs is None
        else {"target": round(costs.target_row, 4), "drafter": round(costs.drafter_row, 4)},
        advice=advice,
        gain=round(gain, 3),
    )


def _wait(busy: dict[str, float], side: str) -> float:
    shares = [share for name, share in busy.items() if name.startswith(side.removesuffix("s"))]
    return 1.0 - sum(shares) / len(shares) if shares else 0.0
