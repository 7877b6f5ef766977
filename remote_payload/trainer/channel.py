"""Bounded hand-over between threads, in order or by number, that wakes everyone when the run ends."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The run is ending; nothing will come and nothing is wanted."""


class Channel(Generic[T]):
    """A queue of at most `capacity` items; each goes to the consumer that asks next."""

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


class Shelf(Generic[T]):
    """Numbered items that several producers bring as they are done and consumers take by their number.

    Of each producer's at most `capacity` lie there. Nothing locks up if producers begin numbers in ascending
    order: who waits for room holds a larger number than all that lie there of its own, so the smallest that
    is not taken yet is never held back.
    """

    def __init__(self, producers: int, capacity: int) -> None:
        self._items: dict[int, tuple[int, T]] = {}
        self._room = [capacity] * producers
        self._closed = False
        self._changed = threading.Condition()

    def put(self, producer: int, number: int, item: T) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._room[producer] > 0)
            if self._closed:
                raise Closed
            self._room[producer] -= 1
            self._items[number] = producer, item
            self._changed.notify_all()

    def take(self, number: int) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or number in self._items)
            if self._closed:
                raise Closed
            producer, item = self._items.pop(number)
            self._room[producer] += 1
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
