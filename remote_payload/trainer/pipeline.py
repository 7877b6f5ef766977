"""The threads of a run: one loader, one per target, one per drafter, with bounded channels between them.

Row r goes to target r mod T and drafter r mod D, over a channel of that pair, so order needs no reorder
buffer and the smallest row not yet consumed can always be produced. Any thread's failure ends all of them and
is told by name.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.channel import Busy, Channel, Closed
from trainer.config import Recipe
from trainer.data import Row, RowOrder
from trainer.exchange import Exchange
from trainer.handoff import Delivery, own_stream, receive, send
from trainer.replica import Contribution, Replica
from trainer.target import Target


@dataclass(frozen=True)
class StepResult:
    """One finished step, over all drafters. `steps_done` counts it; `last`: no step follows in this run."""

    steps_done: int
    loss: float
    accuracy: list[float]
    lr: float
    grad_norm: float
    tokens: int
    step_s: float
    busy: dict[str, float]
    last: bool


class ThreadFailed(Exception):
    """Names the thread; the cause is attached."""


class Pipeline:
    """Runs steps `start_step` … `train.steps` - 1, or until `stop` is set: then it ends after the step in
    flight.

    `on_step` runs in the thread of drafter 0, whose weights stand still until it returns.
    """

    def __init__(
        self,
        recipe: Recipe,
        order: RowOrder,
        targets: list[Target],
        replicas: list[Replica],
        *,
        start_step: int,
        stop: threading.Event,
        on_step: Callable[[StepResult], None],
    ) -> None:
        self._recipe, self._order, self._targets, self._replicas = recipe, order, targets, replicas
        self._start_step, self._stop, self._on_step = start_step, stop, on_step
        rows = recipe.topology.queue_rows
        self._inputs: list[Channel[Row]] = [Channel(rows) for _ in targets]
        self._features: dict[tuple[int, int], Channel[Delivery]] = {
            (t, d): Channel(rows) for t in range(len(targets)) for d in range(len(replicas))
        }
        self._exchange = Exchange([r.drafter for r in replicas], at_rendezvous=self._agree)
        self._stopping = False
        self._failure: tuple[str, BaseException] | None = None
        self._failing = threading.Lock()
        self._busy: dict[str, Busy] = {}
        self._step_began = 0.0

    def run(self, while_running: Callable[[], None]) -> None:
        """Blocks the calling thread, which calls `while_running` a few times a second. Raises
        ThreadFailed."""
        feeders = [self._thread("loader", self._load)]
        feeders += [self._thread(f"target-{t}", self._tap, t) for t in range(len(self._targets))]
        drafters = [self._thread(f"drafter-{d}", self._draft, d) for d in range(len(self._replicas))]
        self._step_began = time.monotonic()
        for thread in feeders + drafters:
            thread.start()
        for thread in drafters:
            while thread.is_alive():
                thread.join(0.2)
                while_running()
        self._close()
        for thread in feeders:
            thread.join()
        if self._failure is not None:
            name, cause = self._failure
            raise ThreadFailed(f"thread {name} failed: {type(cause).__name__}: {cause}") from cause

    def _thread(self, name: str, body: Callable[..., None], *arguments: int) -> threading.Thread:
        self._busy[name] = busy = Busy()

        def guarded() -> None:
            torch.set_num_threads(self._recipe.topology.cpu_threads)
            try:
                body(*arguments, busy)
            except Closed:
                pass
            except BaseException as error:
                with self._failing:
                    self._failure = self._failure or (name, error)
                self._close()

        # torch >= 2.12 keeps its compiler settings per context: a thread that starts empty would not see them
        return threading.Thread(
            target=contextvars.copy_context().run, args=(guarded,), name=name, daemon=True
        )

    def _close(self) -> None:
        for channel in (*self._inputs, *self._features.values()):
            channel.close()
        self._exchange.abort()

    def _load(self, busy: Busy) -> None:
        rows = len(self._replicas)
        for index in range(self._start_step * rows, self._recipe.train.steps * rows):
            row = self._order.row(index)
            with busy.waiting():
                self._inputs[index % len(self._inputs)].put(row)

    def _tap(self, number: int, busy: Busy) -> None:
        target = self._targets[number]
        with own_stream(target.device):
            while True:
                with busy.waiting():
                    row = self._inputs[number].get()
                delivery = send(row, target.features(row))
                with busy.waiting():
                    self._features[number, row.index % len(self._replicas)].put(delivery)

    def _draft(self, rank: int, busy: Busy) -> None:
        replica = self._replicas[rank]
        with own_stream(replica.device):
            for step in range(self._start_step, self._recipe.train.steps):
                index = step * len(self._replicas) + rank
                with busy.waiting():
                    delivery = self._features[index % len(self._targets), rank].get()
                features = receive(delivery, replica.device)
                contribution = replica.backward(delivery.row, features, step)
                del delivery, features
                with busy.waiting():
                    contributions = self._exchange.reduce(rank, contribution)
                last = self._stopping or step + 1 == self._recipe.train.steps
                _prove_equal_weights(contributions, step)
                lr, norm = replica.optimizer.step(step, sum(c.denominator for c in contributions))
                if rank == 0:
                    self._lead(contributions, step, lr, norm, last)
                if last:
                    return

    def _agree(self) -> None:
        """At the rendezvous, one thread decides for all whether this step is the last."""
        self._stopping = self._stop.is_set()

    def _lead(self, all_ranks: list[Contribution], step: int, lr: float, norm: float, last: bool) -> None:
        loss = sum(c.numerator for c in all_ranks) / max(sum(c.denominator for c in all_ranks), 1e-9)
        if not (loss < float("inf") and norm < float("inf")):
            raise FloatingPointError(f"loss {loss}, gradient norm {norm} at step {step + 1}: lower train.lr")
        correct = [sum(slot) for slot in zip(*(c.correct for c in all_ranks), strict=True)]
        counted = [sum(slot) for slot in zip(*(c.counted for c in all_ranks), strict=True)]
        self._on_step(
            StepResult(
                steps_done=step + 1,
                loss=loss,
                accuracy=[
                    round(right / max(seen, 1), 4) for right, seen in zip(correct, counted, strict=True)
                ],
                lr=lr,
                grad_norm=norm,
                tokens=sum(c.tokens for c in all_ranks),
                step_s=time.monotonic() - self._step_began,
                busy={name: round(busy.take_share(), 3) for name, busy in self._busy.items()},
                last=last,
            )
        )
        self._step_began = time.monotonic()


def _prove_equal_weights(contributions: list[Contribution], step: int) -> None:
    sums = {c.weights for c in contributions}
    if len(sums) > 1:
        raise RuntimeError(f"the drafters' weights differ before step {step + 1}: {sorted(map(str, sums))}")
