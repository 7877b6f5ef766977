"""Bounded hand-over between threads, in order or by number, that wakes everyone when the run ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The run is ending; nothing will come and nothing is wanted."""


class _Handover:
    """What threads wait at; closed, it lets nobody wait any more."""

    _items: Any  # a container, of its own kind in each

    def __init__(self) -> None:
        self._closed = False
        self._changed = threading.Condition()

    def _until(self, possible: Callable[[], bool]) -> None:
        """Wait, with `_changed` held. Raises Closed."""
        self._changed.wait_for(lambda: self._closed or possible())
        if self._closed:
            raise Closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class Channel(_Handover, Generic[T]):
    """A queue of at most `capacity` items; each goes to the consumer that asks next."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._items: deque[T] = deque()
        self._capacity = capacity

    def put(self, item: T) -> None:
        with self._changed:
            self._until(lambda: len(self._items) < self._capacity)
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._until(lambda: bool(self._items))
            item = self._items.popleft()
            self._changed.notify_all()
            return item


class Shelf(_Handover, Generic[T]):
    """Numbered items that several producers bring as they are done and consumers take by their number.

    Of each producer's at most `capacity` lie there. Nothing locks up if producers begin numbers in ascending
    order: who waits for room holds a larger number than all that lie there of its own, so the smallest that
    is not taken yet is never held back.
    """

    def __init__(self, producers: int, capacity: int) -> None:
        super().__init__()
        self._items: dict[int, tuple[int, T]] = {}
        self._room = [capacity] * producers

    def put(self, producer: int, number: int, item: T) -> None:
        with self._changed:
            self._until(lambda: self._room[producer] > 0)
            self._room[producer] -= 1
            self._items[number] = producer, item
            self._changed.notify_all()

    def take(self, number: int) -> T:
        with self._changed:
            self._until(lambda: number in self._items)
            producer, item = self._items.pop(number)
            self._room[producer] += 1
            self._changed.notify_all()
            return item
