"""Does the advice of `status` point where trying every split ends? `bench.pipeline --splits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.common import say, table
from trainer import balance
from trainer.config import Recipe
from trainer.pipeline import StepResult
from trainer.replica import Replica
from trainer.target import Target
from trainer.topology import Devices

Split = tuple[int, int]


class Bench(Protocol):
    """What is used of bench.pipeline's; its devices are as pipeline_options lays them out for this."""

    recipe: Recipe
    devices: Devices
    on_gpu: bool
    targets: list[Target]
    replicas: list[Replica]
    rates: dict[str, float]

    def measure(
        self, name: str, targets: list[Target], replicas: list[Replica], *, rows: int | None = None
    ) -> StepResult: ...


@dataclass(frozen=True)
class Tried:
    """A split's rate in tok/s and what `status` would advise during it; None: stay."""

    split: Split
    rate: float
    advice: Split | None


def try_all(bench: Bench) -> None:
    """From the most drafters to one: the drafters of each split took part in all before it, so that their
    weights are equal without being copied."""
    devices, rows = len(bench.targets) + 1, bench.recipe.rows_per_step
    tried = []
    for drafters in range(min(rows, devices - 1), 0, -1):
        split = devices - drafters, drafters
        say(f"\n-- {split[0]}:{split[1]}")
        name = f"{split[0]}:{split[1]}"
        last = bench.measure(name, bench.targets[: split[0]], bench.replicas[-drafters:], rows=rows)
        found = balance.judge(split, last.busy, last.costs, rows, apart=True)
        advice = None if found.advice is None else tuple(map(int, found.advice.split(":")))
        tried.append(Tried(split, bench.rates[name], advice))  # type: ignore[arg-type]
    say()
    table(
        ("split", "tok/s", "advice"),
        [(f"{t.split[0]}:{t.split[1]}", f"{t.rate:,.0f}", _told(t.advice)) for t in tried],
    )
    wrong = misled(tried)
    say(
        f"{rows} row(s) a step; goal: the advice leads to the best split found by trying, or within "
        f"{balance.WORTH:.0%} of its rate" + (f": NOT from {', '.join(wrong)}" if wrong else ": held")
    )
    if wrong and bench.on_gpu:  # on a CPU all threads share the cores, and the times say nothing
        raise AssertionError(f"the advice misleads from {', '.join(wrong)}")


def misled(tried: list[Tried]) -> list[str]:
    """The splits whose advice ends more than balance.WORTH below the best rate."""
    rates = {t.split: t.rate for t in tried}
    enough = max(rates.values()) / (1 + balance.WORTH)
    return [f"{t.split[0]}:{t.split[1]}" for t in tried if rates.get(t.advice or t.split, 0.0) < enough]


def _told(advice: Split | None) -> str:
    return "stay" if advice is None else f"{advice[0]}:{advice[1]}"
