"""What bench.pipeline puts in the place of a run's data and of a side that is left out, and its stopwatch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.clock import ROW, Clock, Stamp
from trainer.data import Document, Row, pack
from trainer.handoff import own_stream, send
from trainer.seeding import generator
from trainer.target import Target

SUPERVISED = 0.7  # of each document, in two answers


class Rows:
    """Row `index`: about `documents` documents whose number, lengths and answers it alone decides."""

    def __init__(self, budget: int, documents: int, vocabulary: int) -> None:
        self._budget, self._documents, self._vocabulary = budget, documents, vocabulary

    def row(self, index: int) -> Row:
        draw = generator("bench", "row", index)
        count = int(torch.randint(max(1, self._documents // 2), 2 * self._documents, (), generator=draw))
        share = torch.rand(count, generator=draw) + 0.1
        lengths = (share / share.sum() * (self._budget - 8)).long().clamp(min=32).tolist()
        documents: list[Document] = []
        for number, length in enumerate(lengths):
            if sum(len(d.ids) for d in documents) + length > self._budget:
                break
            mask = torch.zeros(length, dtype=torch.bool)
            half, question = length // 2, max(1, int(length * (1 - SUPERVISED) / 2))
            mask[question:half] = mask[half + question :] = True
            ids = torch.randint(8, self._vocabulary, (length,), generator=draw)
            documents.append(Document(ids, mask, str(number)))
        return pack(documents, self._budget, index)


class Ready:
    """A target that has its features already: what is left of the pipeline is the drafters."""

    def __init__(self, device: torch.device, features: Tensor) -> None:
        self.device, self._features = device, features

    def features(self, row: Row) -> Tensor:
        return self._features


class Timed:
    """What one thread's `count` rows took on its device, by its own events."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device, self.count = device, count
        self.began: Stamp
        self.ended: Stamp
        self.failure: BaseException | None = None

    @property
    def seconds(self) -> float:
        """A row's mean."""
        return self.began.seconds_until(self.ended) / self.count

    def run(
        self, features: Callable[[Row], Tensor], rows: Any, first: int, step: int, together: threading.Barrier
    ) -> None:
        """The rows one after the other as a target's thread runs them, after one to begin with. Threads begin
        to count `together`: on a shared card none of the others' first rows lies between."""
        try:
            with own_stream(self.device):
                pace = Clock(self.device)
                for number in range(self.count + 1):
                    row = rows.row(first + number * step)
                    pace.keep_pace()
                    if number == 1:
                        Stamp(self.device).wait()
                        together.wait()
                        self.began = Stamp(self.device)
                    with pace.work(ROW):
                        send(row, features(row))
                self.ended = Stamp(self.device)
                self.ended.wait()
        except BaseException as error:
            self.failure = error
            together.abort()


def run_alone(targets: Sequence[Target], rows: Any, count: int) -> list[Timed]:
    """Every target's thread on `count` rows, with a drafter that takes the features and does nothing."""
    timers = [Timed(target.device, count) for target in targets]
    together = threading.Barrier(len(timers))
    threads = [
        threading.Thread(target=timer.run, args=(target.features, rows, number, len(timers), together))
        for number, (timer, target) in enumerate(zip(timers, targets, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [timer.failure for timer in timers if timer.failure is not None]
    if failures:  # the others then only tell that they waited in vain
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    return timers


def rows_a_second(timers: Sequence[Timed]) -> float:
    """Of all devices. Threads of one device share its time and end apart, so their rows count over the span
    from the first begin to the last end there; rates of devices add up, whose events do not compare."""
    total = 0.0
    for device in {timer.device for timer in timers}:
        mine = [timer for timer in timers if timer.device == device]
        span = max(one.began.seconds_until(other.ended) for one in mine for other in mine)
        total += sum(timer.count for timer in mine) / span
    return total
