"""How many logins a host is asked for at once: OpenSSH drops some of more than ten that are not done yet."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# MaxStartups is 10:30:100: from the tenth on one in three is hung up on. The server counts one for a moment
# longer than we do (of eight at a time it saw ten now and then), and others log in, too.
AT_ONCE = 6
TRIES = 5  # for a host that hung up before its first word; three seconds in all
_PAUSE_S = 0.2  # after the first one, then twice as long after each


class Door:
    """One host's port, as this process sees it. Threads pass it side by side, `AT_ONCE` at most."""

    def __init__(self) -> None:
        self._inside = 0
        self._silent_at = float("-inf")
        self._free = threading.Condition()

    @contextmanager
    def passing(self, limit: float) -> Iterator[None]:
        """Around one login. TimeoutError: while we waited, one before us had no answer within `limit`
        seconds; whoever stands behind it need not wait as long again."""
        came = time.monotonic()
        with self._free:
            while self._inside >= AT_ONCE:
                self._free.wait()
            if self._silent_at > came:
                self._free.notify()  # the place goes on to the next
                raise TimeoutError
            self._inside += 1
        began = time.monotonic()
        try:
            yield
        except BaseException:
            if time.monotonic() - began >= limit:
                self._silent_at = time.monotonic()
            raise
        finally:
            with self._free:
                self._inside -= 1
                self._free.notify()


_doors: dict[tuple[str, int], Door] = {}
_guard = threading.Lock()


def door(host: str, port: int) -> Door:
    with _guard:
        return _doors.setdefault((host, port), Door())


def pause(tried: int) -> float:
    """Seconds until the next try after `tried` ones; never the same for two that were hung up on together."""
    return _PAUSE_S * (1 << (tried - 1)) * random.uniform(0.5, 1.5)
