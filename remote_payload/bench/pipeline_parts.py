"""What bench.pipeline puts in the place of a run's data and of a side that is left out, and its stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.clock import ROW, Clock, Stamp
from trainer.data import Document, Row, pack
from trainer.handoff import own_stream, send
from trainer.seeding import generator

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
    """Seconds of work on one device, by its own events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.failure: BaseException | None = None

    def rows(self, features: Callable[[Row], Tensor], rows: Any, count: int, first: int, step: int) -> None:
        """Mean of `count` rows one after the other as a target's thread runs them, after one to begin
        with."""
        try:
            with own_stream(self.device):
                pace = Clock(self.device)
                began = None
                for number in range(count + 1):
                    row = rows.row(first + number * step)
                    pace.keep_pace()
                    if number == 1:
                        began = Stamp(self.device)
                    with pace.work(ROW):
                        send(row, features(row))
                ended = Stamp(self.device)
                ended.wait()
                assert began is not None
                self.seconds = began.seconds_until(ended) / count
        except BaseException as error:
            self.failure = error
