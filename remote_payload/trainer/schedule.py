"""Who learns from which row: a pure function of the step, so that every thread and process agrees unasked.

A step is `rows_per_step` rows whatever the number of drafters. The drafters of all processes, counted through
(process 0's first), take the step's rows in turn: drafter d of D takes rows d, d+D, …; a drafter beyond the
rows of a step adds nothing to it. Which target computes a row's features is left to their pace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Turn:
    """Row `row` of the whole training is for drafter `drafter` of this process."""

    row: int
    drafter: int


@dataclass(frozen=True)
class Schedule:
    """The turns of one process out of `processes`, each with as many drafters."""

    rows_per_step: int
    drafters: int
    process: int = 0
    processes: int = 1

    @cached_property
    def _mine(self) -> list[tuple[int, int]]:
        """(place of the row within its step, drafter) of each row that this process takes in every step."""
        everyone = self.drafters * self.processes
        owners = [divmod(place % everyone, self.drafters) for place in range(self.rows_per_step)]
        return [(place, drafter) for place, (owner, drafter) in enumerate(owners) if owner == self.process]

    def step(self, step: int) -> list[Turn]:
        """In the order of the rows."""
        return [Turn(step * self.rows_per_step + place, drafter) for place, drafter in self._mine]

    def of_drafter(self, step: int, drafter: int) -> list[Turn]:
        return [turn for turn in self.step(step) if turn.drafter == drafter]
