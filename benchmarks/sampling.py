"""Processes over time: does one grow, has one become a zombie, was one left behind."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP = 0.3  # of a process's samples: imports, first buffers, the allocator's pools
RSS_SLACK = 0.06, 3 << 20  # what two halves may differ: a share, and bytes at least
COUNT_SLACK = 4  # files and threads: a server on a busy machine always has some calls in flight
ZOMBIE_S = 3.0  # a parent may be slow to look


@dataclass(frozen=True)
class Sample:
    """One look: seconds since the epoch, resident bytes, open files, threads."""

    at: float
    rss: int
    files: int
    threads: int


@dataclass
class Series:
    """Samples of one process from start to end."""

    role: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    def halves(self) -> tuple[list[Sample], list[Sample]]:
        warm = self.samples[int(len(self.samples) * WARM_UP) :]
        return warm[: len(warm) // 2], warm[len(warm) // 2 :]

    def growth(self) -> list[str]:
        """What grew between the halves after the warm-up; empty when nothing did or it lived too short.

        Memory by the medians; files and threads by their floors, for a call in flight has some for a moment.
        """
        before, after = self.halves()
        if len(before) < 5:
            return []
        found = []
        old, new = (statistics.median(sample.rss for sample in half) for half in (before, after))
        if new - old > max(RSS_SLACK[0] * old, RSS_SLACK[1]):
            found.append(f"{self.role} grew from {old / 2**20:.1f} to {new / 2**20:.1f} MiB")
        for what in ("files", "threads"):
            low, high = (min(getattr(sample, what) for sample in half) for half in (before, after))
            if high > low + COUNT_SLACK:
                found.append(f"{self.role} had {low} {what}, then never less than {high}")
        return found

    def line(self) -> str:
        """`role  seconds  MiB first half → second  files floor → floor  threads`."""
        before, after = self.halves()
        if not before:
            return f"{self.role:<16} {len(self.samples)} samples"
        span = self.samples[-1].at - self.samples[0].at
        mib = [statistics.median(sample.rss for sample in half) / 2**20 for half in (before, after)]
        files = [min(sample.files for sample in half) for half in (before, after)]
        threads = [min(sample.threads for sample in half) for half in (before, after)]
        peak = max(sample.rss for sample in self.samples) / 2**20
        return (
            f"{self.role:<16} {span:6.0f} s   {mib[0]:6.2f} → {mib[1]:6.2f} MiB (peak {peak:.1f})   "
            f"files {files[0]} → {files[1]}   threads {threads[0]} → {threads[1]}"
        )


class Sampler:
    """Looks at `watched()` ((role, pid), …) again and again in a thread of its own, until it is stopped.

    `series` has one entry for each process that was seen in a role; `zombies` what stayed one for ZOMBIE_S
    below any of `families` (process ids).
    """

    def __init__(
        self,
        watched: Callable[[], Iterable[tuple[str, int]]],
        families: Callable[[], Iterable[int]],
        every_s: float,
    ) -> None:
        self.series: dict[tuple[str, int], Series] = {}
        self.zombies: list[str] = []
        self.looks = 0
        self._dead_since: dict[int, float] = {}
        self._watched, self._families, self._every_s = watched, families, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def growth(self) -> list[str]:
        return [line for series in self.series.values() for line in series.growth()]

    def lines(self) -> list[str]:
        """One for each role: its longest series, and how many more processes were seen in it."""
        found = []
        for role in dict.fromkeys(series.role for series in self.series.values()):
            every = [series for series in self.series.values() if series.role == role]
            longest = max(every, key=lambda series: len(series.samples))
            found.append(longest.line() + (f"   and {len(every) - 1} more" if len(every) > 1 else ""))
        return found

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.looks += 1
            for role, pid in self._watched():
                sample = look(pid)
                if sample is not None:
                    self.series.setdefault((role, pid), Series(role, pid)).samples.append(sample)
            self._look_for_zombies()

    def _look_for_zombies(self) -> None:
        now, dead = time.time(), {}
        for pid, name in zombies(self._families()).items():
            dead[pid] = self._dead_since.get(pid, now)
            if now - dead[pid] >= ZOMBIE_S:
                self.zombies.append(f"{name} ({pid}) has been a zombie for {now - dead[pid]:.0f} s")
                dead[pid] = float("inf")  # said once
        self._dead_since = dead


def look(pid: int) -> Sample | None:
    """None when the process is gone."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return Sample(time.time(), int(status["VmRSS"].split()[0]) << 10, files, int(status["Threads"]))
    except (OSError, KeyError):
        return None


def zombies(families: Iterable[int]) -> dict[int, str]:
    """Zombies among the descendants of `families`: {pid: name}."""
    parents: dict[int, int] = {}
    dead: dict[int, str] = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            state, parent, *_ = rest.split()
            parents[pid] = int(parent)
            if state == "Z":
                dead[pid] = f"{head.partition('(')[2]} of {_command(int(parent))}"
    roots = set(families)

    def below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid in roots:
                return True
        return False

    return {pid: name for pid, name in dead.items() if below(pid)}


def inside(init: int) -> dict[int, list[str]]:
    """The processes in the name space of a container's first one, itself left out: {pid: argv}."""
    space = Path(f"/proc/{init}/ns/pid").readlink()
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            if pid != init and Path(f"/proc/{pid}/ns/pid").readlink() == space:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
                found[pid] = [word.decode(errors="replace") for word in words]
    return found


def _command(pid: int) -> str:
    """Its argument list, cut; empty when it is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode(errors="replace")[-60:].strip()
    return ""


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
