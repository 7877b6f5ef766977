"""Bounded hand-over between threads that wakes everyone when the run ends and knows how long each waited."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The run is ending; nothing will come and nothing is wanted."""


class Channel(Generic[T]):
    """A queue of at most `capacity` items between one producer and one consumer."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: T) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if self._closed:
                raise Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class Busy:
    """One thread's share of time spent working rather than waiting for others."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._waited = 0.0
        self._waiting_since: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - self._waiting_since
            self._waiting_since = None

    def take_share(self) -> float:
        """Share since the last call, in [0, 1]; read by another thread, so approximate by one scheduling
        delay."""
        now = time.monotonic()
        started = self._waiting_since
        waited = self._waited + (now - started if started is not None else 0.0)
        share = 1.0 - waited / max(now - self._since, 1e-9)
        self._since = now
        self._waited = -(now - started) if started is not None else 0.0
        return min(max(share, 0.0), 1.0)
