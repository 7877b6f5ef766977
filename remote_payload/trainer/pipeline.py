"""The threads of a run: one loader, one per target, one per drafter, with bounded channels between them.

Rows are begun in order by whichever target is free, because GPUs of one kind differ by 5 % and in turn all
would go at the slowest one's pace; they lie on a shelf until the drafter whose row it is (schedule.py) asks
for it. So what is learnt does not depend on who was faster. Any thread's failure ends all of them and is told
by name.

On CUDA the hosts run ahead of their devices: each step's numbers are read one step late, so that reading them
stops nothing. Where `stands_still` asks for it (a checkpoint, an evaluation) they are read at once.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.balance import Costs
from trainer.channel import Channel, Closed, Shelf
from trainer.clock import DONE, EXCHANGE, REPORTING, ROW, STEP, WAITING, Clock, Stamp
from trainer.config import Recipe
from trainer.data import Row
from trainer.exchange import Exchange, checksum
from trainer.handoff import Delivery, Inbox, own_stream, send
from trainer.readout import Readout
from trainer.replica import Replica
from trainer.schedule import Schedule
from trainer.target import Target
from trainer.watchdog import Watchdog
from trainer.world import ALONE, World

CHECKSUM_EVERY = 20  # steps between two proofs that all drafters hold the same weights


class Rows(Protocol):
    def row(self, index: int) -> Row: ...


@dataclass(frozen=True)
class StepResult:
    """One finished step, over all drafters of all processes. `steps_done` counts it; `last`: no step follows
    in this run. `busy`: working share of each thread of this process; `costs`: None until measured."""

    steps_done: int
    loss: float
    accuracy: list[float]
    lr: float
    grad_norm: float
    tokens: int
    step_s: float
    busy: dict[str, float]
    costs: Costs | None
    last: bool


@dataclass(frozen=True)
class _Pending:
    """A step whose numbers are on their way to the host."""

    step: int
    lr: float
    numbers: Readout  # the sums of all rows, then the gradient's norm
    weights: list[Readout]  # by rank; empty in steps without a proof
    began: Stamp
    ended: Stamp
    last: bool


class ThreadFailed(Exception):
    """Names the thread; the cause is attached."""


class Pipeline:
    """Runs steps `start_step` … `train.steps` - 1, or until `stop` is set: then it ends after the step in
    flight.

    `on_step` runs in the thread of drafter 0. Its weights are those of the step it is told of where
    `stands_still(steps done)`, and stand still until it returns; elsewhere they may be a step further.
    """

    def __init__(
        self,
        recipe: Recipe,
        order: Rows,
        targets: list[Target],
        replicas: list[Replica],
        *,
        start_step: int,
        stop: threading.Event,
        on_step: Callable[[StepResult], None],
        stands_still: Callable[[int], bool] = lambda steps_done: False,
        world: World = ALONE,
    ) -> None:
        self._recipe, self._order, self._targets, self._replicas = recipe, order, targets, replicas
        self._start_step, self._stop, self._on_step = start_step, stop, on_step
        self._stands_still, self._world = stands_still, world
        self._schedule = Schedule(
            recipe.rows_per_step, len(replicas), process=world.rank, processes=world.size
        )
        rows = recipe.topology.queue_rows
        self._rows: Channel[Row] = Channel(rows * len(targets))
        self._features: Shelf[Delivery] = Shelf(len(targets), rows)
        self._exchange = Exchange([r.device for r in replicas], world, at_rendezvous=self._agree)
        self.means = self._exchange.means  # how gradients meet, for the log
        self._stopping = False
        self._failure: tuple[str, BaseException] | None = None
        self._failing = threading.Lock()
        self._clocks: dict[str, Clock] = {}
        self._pending: deque[_Pending] = deque()
        self._began: Stamp | None = None
        self._step_s = 0.0

    def run(self, while_running: Callable[[], None]) -> None:
        """Blocks the calling thread, which calls `while_running` a few times a second. Raises
        ThreadFailed."""
        feeders = [self._thread("loader", self._load, Clock())]
        for t, target in enumerate(self._targets):
            feeders.append(self._thread(f"target-{t}", self._tap, Clock(target.device), t))
        drafters = [
            self._thread(f"drafter-{d}", self._draft, Clock(replica.device), d)
            for d, replica in enumerate(self._replicas)
        ]
        watchdog = Watchdog(self._clocks)
        for thread in feeders + drafters:
            thread.start()
        self._wait_for(drafters, watchdog, while_running)
        self._close()
        self._wait_for(feeders, watchdog)  # in a call that hangs none hears of another's failure
        watchdog.rest()
        if self._failure is not None:
            name, cause = self._failure
            raise ThreadFailed(f"thread {name} failed: {type(cause).__name__}: {cause}") from cause

    def _wait_for(
        self,
        threads: list[threading.Thread],
        watchdog: Watchdog,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                meanwhile()
                if hang := watchdog.look(self._step_s):
                    print(hang, flush=True)

    def _thread(
        self, name: str, body: Callable[..., None], clock: Clock, *arguments: int
    ) -> threading.Thread:
        self._clocks[name] = clock

        def guarded() -> None:
            torch.set_num_threads(self._recipe.topology.cpu_threads)
            try:
                body(clock, *arguments)
            except Closed:
                pass
            except BaseException as error:
                # the watchdog tells it where another thread hangs: the run cannot end then and raise it
                clock.mark(f"failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                with self._failing:
                    self._failure = self._failure or (name, error)
                self._close()
                return
            clock.mark(DONE)

        # torch >= 2.12 keeps its compiler settings per context: a thread that starts empty would not see them
        return threading.Thread(
            target=contextvars.copy_context().run, args=(guarded,), name=name, daemon=True
        )

    def _close(self) -> None:
        self._rows.close()
        self._features.close()
        self._exchange.abort()

    def _steps(self) -> range:
        return range(self._start_step, self._recipe.train.steps)

    def _load(self, clock: Clock) -> None:
        for step in self._steps():
            for turn in self._schedule.step(step):
                clock.mark(f"packing row {turn.row}")
                with clock.work(ROW):
                    row = self._order.row(turn.row)
                clock.mark(f"{WAITING} for a target to take row {turn.row}")
                self._rows.put(row)

    def _tap(self, clock: Clock, number: int) -> None:
        target = self._targets[number]
        with own_stream(target.device):
            while True:  # until it is Closed: the drafters know which step is the last
                clock.mark("features of the rows begun")
                clock.keep_pace()
                clock.mark(f"{WAITING} for a row")
                row = self._rows.get()
                clock.mark(f"features of row {row.index}")
                with clock.work(ROW):
                    delivery = send(row, target.features(row))
                clock.mark(f"{WAITING} for the drafters to take rows before {row.index}")
                self._features.put(number, row.index, delivery)
                del row, delivery  # the memory of a row is not held while the next one is awaited

    def _draft(self, clock: Clock, rank: int) -> None:
        replica = self._replicas[rank]
        with own_stream(replica.device):
            inbox = Inbox(replica.device)
            if rank == 0:
                self._began = Stamp(replica.device)
            for step in self._steps():
                proof = self._proof(replica, rank) if step % CHECKSUM_EVERY == 0 else None
                sums = self._backward(clock, replica, rank, inbox, step)
                clock.mark(f"{WAITING} for the other drafters' gradients of step {step + 1}")
                with clock.work(EXCHANGE):
                    proofs = self._exchange.reduce(rank, [*replica.gradients(), sums], proof)
                last = self._stopping or step + 1 == self._recipe.train.steps
                clock.mark(f"optimizer of step {step + 1}")
                with clock.work(STEP):
                    lr, norm = replica.optimizer.step(step, sums[1])
                if rank == 0:
                    self._lead(clock, replica, step, lr, torch.cat([sums, norm[None].double()]), proofs, last)
                if last:
                    return

    def _proof(self, replica: Replica, rank: int) -> Readout:
        bits = checksum(replica.storage.weights)
        return Readout(self._world.spread(bits) if rank == 0 else bits)

    def _backward(self, clock: Clock, replica: Replica, rank: int, inbox: Inbox, step: int) -> Tensor:
        """Gradients of this drafter's rows of the step add up in the replica. Returns float64 sums on its
        device: loss numerator, denominator, correct and counted by slot, tokens."""
        slots = replica.geometry.block_size - 1
        sums = torch.zeros(3 + 2 * slots, dtype=torch.float64, device=replica.device)
        for turn in self._schedule.of_drafter(step, rank):
            clock.mark(f"{WAITING} for the features of row {turn.row}")
            delivery = self._features.take(turn.row)
            clock.mark(f"backward of row {turn.row}")
            clock.keep_pace()
            features = inbox.take(delivery)
            with clock.work(ROW):
                brought = replica.backward(delivery.row, features)
            inbox.release()
            sums[:-1] += brought.numbers
            sums[-1] += brought.tokens
            del delivery, features
        return sums

    def _agree(self) -> None:
        """At the rendezvous, one thread decides for all whether this step is the last."""
        self._stopping = self._world.any(self._stop.is_set())

    def _lead(
        self,
        clock: Clock,
        replica: Replica,
        step: int,
        lr: float,
        numbers: Tensor,
        proofs: list[Readout | None],
        last: bool,
    ) -> None:
        """Queue this step's numbers and tell those of the step before; with a reason to stop, both."""
        assert self._began is not None
        ended = Stamp(replica.device)
        weights = [proof for proof in proofs if proof is not None]
        self._pending.append(_Pending(step, lr, Readout(numbers), weights, self._began, ended, last))
        self._began = ended
        at_once = last or not _reads_late(replica.device) or self._stands_still(step + 1)
        clock.mark(REPORTING)
        while len(self._pending) > (0 if at_once else 1):
            self._tell(self._pending.popleft())
        if at_once:
            self._began = Stamp(replica.device)  # what a checkpoint or an evaluation takes is no step's time

    def _tell(self, done: _Pending) -> None:
        _prove_equal_weights(done)
        numerator, denominator, *counts, tokens, norm = done.numbers.values()
        loss = numerator / max(denominator, 1e-9)
        if not (loss < float("inf") and norm < float("inf")):
            what = f"loss {loss}, gradient norm {norm} at step {done.step + 1}"
            if done.step == self._start_step:  # no update yet: the rate is not to blame
                raise FloatingPointError(f"{what}, the run's first: the target's features are no numbers")
            raise FloatingPointError(f"{what}: lower train.lr")
        slots = len(counts) // 2
        self._step_s = done.began.seconds_until(done.ended)
        self._on_step(
            StepResult(
                steps_done=done.step + 1,
                loss=loss,
                accuracy=[
                    round(right / max(seen, 1.0), 4)
                    for right, seen in zip(counts[:slots], counts[slots:], strict=True)
                ],
                lr=done.lr,
                grad_norm=norm,
                tokens=round(tokens),
                step_s=self._step_s,
                busy={name: round(clock.share() or 0.0, 3) for name, clock in self._clocks.items()},
                costs=self._costs(),
                last=done.last,
            )
        )

    def _costs(self) -> Costs | None:
        """Medians over the threads of a side. The exchange takes as long as it takes the last to come."""

        def seconds(side: str, kind: str) -> list[float]:
            spans = [clock.seconds(kind) for name, clock in self._clocks.items() if name.startswith(side)]
            return sorted(span for span in spans if span is not None)

        targets, drafters = seconds("target", ROW), seconds("drafter", ROW)
        steps, exchanges = seconds("drafter", STEP), seconds("drafter", EXCHANGE)
        if not (targets and drafters and steps and exchanges):
            return None
        return Costs(
            target_row=targets[len(targets) // 2],
            drafter_row=drafters[len(drafters) // 2],
            drafter_step=steps[len(steps) // 2] + exchanges[0],
        )


def _reads_late(device: torch.device) -> bool:
    return device.type == "cuda"  # a CPU's numbers are there, and nothing would be gained


def _prove_equal_weights(done: _Pending) -> None:
    sums = {value for proof in done.weights for value in proof.values()}
    if len(sums) > 1:
        raise RuntimeError(f"the drafters' weights differ before step {done.step + 1}: {sorted(sums)}")
