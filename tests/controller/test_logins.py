"""Whoever waits for his turn at a host that turns out to be silent does not wait for its silence again."""

from __future__ import annotations

import threading
import time

from controller import logins


def test_those_behind_a_silent_login_do_not_try_it_one_after_the_other() -> None:
    door, told = logins.door("silent.invalid", 22), threading.Event()
    ends: list[str] = []

    def log_in(works: bool) -> None:
        try:
            with door.passing(0.0):
                told.wait(60)
                if not works:
                    raise EOFError
                ends.append("in")
        except (EOFError, TimeoutError) as error:
            ends.append(type(error).__name__)

    def start(count: int, works: bool) -> list[threading.Thread]:
        made = [threading.Thread(target=log_in, args=(works,), daemon=True) for _ in range(count)]
        for thread in made:
            thread.start()
        return made

    first = start(logins.AT_ONCE, works=False)
    until = time.monotonic() + 60
    while door._inside < logins.AT_ONCE:
        assert time.monotonic() < until
        time.sleep(0.01)
    behind = start(12, works=True)
    while len(door._free._waiters) < 12:  # type: ignore[attr-defined]  # the standard library's own
        assert time.monotonic() < until
        time.sleep(0.01)
    assert door._inside == logins.AT_ONCE  # nobody slipped in
    told.set()
    for thread in first + behind:
        thread.join(60)
    assert sorted(ends) == ["EOFError"] * logins.AT_ONCE + ["TimeoutError"] * 12
    log_in(works=True)
    assert ends[-1] == "in"  # the next one tries it anew


def test_two_that_were_hung_up_on_together_do_not_come_back_together() -> None:
    assert len({logins.pause(1) for _ in range(20)}) > 10
    assert sum(logins.pause(tried) for tried in range(1, logins.TRIES)) < 5
