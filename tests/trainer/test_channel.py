"""What is handed from thread to thread arrives once, in its order, and never waits for what cannot come."""

from __future__ import annotations

import random
import threading

import pytest

from trainer.channel import Channel, Closed, Shelf

LIMIT_S = 900.0


def in_threads(*bodies):
    """All of them at once; what each returned, or the exception that ended it."""
    ends: list[object] = [None] * len(bodies)

    def run(number, body):
        try:
            ends[number] = body()
        except BaseException as error:
            ends[number] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    return threads, ends


def finish(threads):
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("producers", [1, 3])
@pytest.mark.parametrize("consumers", [1, 2])
def test_numbered_items_arrive_whoever_is_slow(capacity, producers, consumers):
    """As in a step: producers begin rows in order, consumers take theirs in order and meet now and then."""
    numbers, shelf = Channel[int](producers), Shelf[str](producers, capacity)
    meeting, total = threading.Barrier(consumers), 24

    def load():
        for number in range(total):
            numbers.put(number)

    def produce(producer):
        draw = random.Random(producer)
        while True:
            number = numbers.get()
            threading.Event().wait(draw.random() * 0.004)
            shelf.put(producer, number, f"item {number}")

    def consume(consumer):
        found = []
        for number in range(consumer, total, consumers):
            found.append(shelf.take(number))
            meeting.wait(LIMIT_S)
        return found

    makers, ends = in_threads(load, *(lambda p=p: produce(p) for p in range(producers)))
    takers, found = in_threads(*(lambda c=c: consume(c) for c in range(consumers)))
    finish(takers)
    assert found == [[f"item {n}" for n in range(c, total, consumers)] for c in range(consumers)]
    numbers.close()
    finish(makers)
    assert ends[0] is None and all(isinstance(end, Closed) for end in ends[1:])


def test_a_producer_waits_while_its_share_lies_there_and_no_other_producer_does():
    shelf = Shelf[str](producers=2, capacity=1)
    shelf.put(0, 5, "first")
    threads, ends = in_threads(lambda: shelf.put(0, 7, "second"))
    shelf.put(1, 6, "of the other")
    threads[0].join(0.2)
    assert threads[0].is_alive()
    assert shelf.take(6) == "of the other"  # not its own: still no room
    threads[0].join(0.2)
    assert threads[0].is_alive()
    assert shelf.take(5) == "first"
    finish(threads)
    assert ends == [None] and shelf.take(7) == "second"


@pytest.mark.parametrize("waits", ["put", "take", "get"])
def test_closing_wakes_whoever_waits(waits):
    shelf, channel = Shelf[int](1, 1), Channel[int](1)
    shelf.put(0, 1, 1)
    body = {"put": lambda: shelf.put(0, 2, 2), "take": lambda: shelf.take(9), "get": channel.get}[waits]
    threads, ends = in_threads(body)
    threads[0].join(0.05)
    shelf.close()
    channel.close()
    finish(threads)
    assert isinstance(ends[0], Closed)
