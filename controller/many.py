"""Several boxes at once: in the order in which they were named, each told when it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Thread

from controller import render, words
from controller.console import Console
from controller.errors import PctrunError
from controller.inventory import Box
from controller.outcome import Outcome

Result = Outcome | PctrunError
Act = Callable[[Box, Console], Outcome]

PATIENCE_S, AGAIN_S = 3.0, 15.0  # until it is said for whom we wait, and until it is said again
_FEW = 2  # lines that are shown with the box's name before each; more stand below it


def over(boxes: Sequence[Box], act: Act, *, parallel: bool) -> Iterator[tuple[Box, Result]]:
    """What `act` did on each, in their order. An expected error is a result; another ends the whole, but not
    before every box is through."""
    if len(boxes) == 1 or not parallel:
        for box in boxes:
            yield box, _one(box, act, len(boxes) > 1, header=not parallel)
        return
    results: dict[str, Result] = {}
    failures: list[BaseException] = []

    def work(box: Box) -> None:
        try:
            results[box.name] = _one(box, act, True)
        except BaseException as error:
            failures.append(error)

    # Daemon threads, not a pool: after Ctrl-C nobody waits for one that waits.
    threads = {box.name: Thread(target=work, args=(box,), daemon=True) for box in boxes}
    for thread in threads.values():
        thread.start()
    for box in boxes:
        _await(threads, box.name)
        if box.name not in results:
            for thread in threads.values():
                thread.join()
            raise failures[0]
        yield box, results[box.name]


def _one(box: Box, act: Act, several: bool, *, header: bool = False) -> Result:
    console = Console(box.name if several else "")
    if several and header:
        console.note(f"container {box.vmid}")
    try:
        return act(box, console)
    except PctrunError as error:
        return error
    finally:
        console.clear()


def _await(threads: dict[str, Thread], name: str) -> None:
    """Wait for one box; on stderr, now and then, for which ones."""
    tell_at = time.monotonic() + PATIENCE_S
    while threads[name].is_alive():
        threads[name].join(0.1)
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + AGAIN_S
            Console().note(f"waiting for {', '.join(each for each in threads if threads[each].is_alive())}")


def text(box: Box, outcome: Outcome, width: int) -> str:
    """One box's answer among others': one line, or a few that each begin with its name (`width` characters
    wide); a screen or a table stays together."""
    lines = (outcome.line or outcome.text).split("\n")
    if lines[0].startswith(box.label):
        rest = lines[0].removeprefix(box.label)
        return words.cut(f"{box.label:<{width}}{rest}", render.WIDTH) if len(lines) == 1 else "\n".join(lines)
    if len(lines) > _FEW:
        return "\n".join((box.label, *lines))
    return "\n".join(f"{box.label:<{width}}  {line}" for line in lines)
