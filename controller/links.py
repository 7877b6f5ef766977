"""One connection a box for the whole invoke process, so that `invoke deploy restart status` logs in once."""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass, field

from controller import embedded
from controller.console import Console
from controller.deadline import DEFAULT, Deadline
from controller.endpoint import resolve
from controller.errors import PctrunError
from controller.inventory import Box
from controller.transport import Link


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: Link | None = None
    failure: PctrunError | None = None  # of a connection that was tried ahead; the next `get` tells it
    round_trips: int = 0


_slots: dict[str, _Slot] = {}
_guard = threading.Lock()


def _slot(box: Box) -> _Slot:
    with _guard:
        return _slots.setdefault(box.name, _Slot())


def get(box: Box, *, deadline: Deadline = DEFAULT, revive: bool = False) -> Link:
    """The open connection of `box`; a dead one is replaced. `revive` as in `endpoint.resolve`."""
    slot = _slot(box)
    with slot.lock:
        failure, slot.failure = slot.failure, None
        if slot.link is not None and not slot.link.alive:
            slot.link.close()
            slot.link = None
        if slot.link is None:
            if failure is not None:
                raise failure
            slot.link = Link(resolve(box, revive=revive), deadline)
        return slot.link


def wake(box: Box, console: Console) -> Link:
    """`get` for a command that is a wish for the box: an embedded one comes up again, which is said."""
    was_down = box.sandbox and embedded.is_down_by_hand()
    link = get(box, revive=True)
    if was_down:
        console.note("the sandbox was down, it is up again")
    return link


def dial_ahead(box: Box) -> None:
    """Connect already, for a `get` that is to come; it gets the failure, too.

    An embedded box that is down stays so: whether it is to come up, only an operation knows.
    """
    slot = _slot(box)
    with slot.lock:
        if slot.link is not None or (box.sandbox and not embedded.is_up()):
            return
        try:
            slot.link = Link(resolve(box))
        except PctrunError as error:
            slot.failure = error


def drop(box: Box) -> None:
    """Close the connection of `box`, if there is one; the next call opens another."""
    slot = _slot(box)
    with slot.lock:
        link, slot.link = slot.link, None
    if link is not None:
        link.close()


def count_round_trip(box: Box) -> None:
    _slot(box).round_trips += 1


def round_trips(box: Box) -> int:
    """`pct exec` calls of this process for `box`: the unit of cost, about 0.6 s of the host's CPU each."""
    return _slot(box).round_trips


def close_all() -> None:
    with _guard:
        slots = list(_slots.values())
    for slot in slots:
        if slot.link is not None:
            slot.link.close()
            slot.link = None


atexit.register(close_all)
