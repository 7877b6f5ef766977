"""Processes are found by the marker in their environment, never by name, and signalled while unchanged.

torchelastic starts every rank in a session of its own, so process groups do not cover a run (pytorch PR
113231), and `pkill -f` matches the shell that carries the pattern. The environment is inherited by all.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Iterator, NamedTuple

RUN_ID = "PCTRUN_RUN_ID"
RUN_DIR = "PCTRUN_RUN_DIR"
NOTIFIER = "agent.notifier"  # in its argument list: what tells it from the trainer and its workers
_MARK = f"{RUN_DIR}=".encode()
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PF_EXITING = 0x4  # among the flags of stat, as the kernel numbers them in include/linux/sched.h


class Proc(NamedTuple):
    """One process as /proc shows it. (pid, start) names it for good: `start` is in clock ticks since boot."""

    pid: int
    ppid: int
    start: int
    state: str
    threads: int
    rss_bytes: int
    argv: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command line on one line, cut to 200 characters."""
        return " ".join(" ".join(self.argv).split())[:200]


def pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def read_proc(pid: int, name: str) -> bytes:
    """One file of /proc/PID, empty when the process or the permission is gone."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            parts: list[bytes] = []
            while True:  # one read returns at most a page of environ on old kernels
                part = file.read(1 << 16)
                if not part:
                    return b"".join(parts)
                parts.append(part)
    except OSError:
        return b""


def _stat(pid: int) -> list[bytes]:
    """The fields from the state on: `pid (comm) state ppid …`, where comm may hold spaces and brackets."""
    return read_proc(pid, "stat").rpartition(b")")[2].split()


def look(pid: int) -> Proc | None:
    """The process, or None when it is gone, a zombie, or on its way there."""
    fields = _stat(pid)
    if len(fields) < 22 or fields[0] in (b"Z", b"X"):
        return None
    argv = read_proc(pid, "cmdline").decode("utf-8", "replace").split("\0")[:-1]
    if not argv:  # it never had any, or has given its memory back meanwhile
        now = _stat(pid)
        if len(now) < 22 or int(now[6]) & _PF_EXITING:
            return None
    return Proc(
        pid=pid,
        ppid=int(fields[1]),
        start=int(fields[19]),
        state=fields[0].decode(),
        threads=int(fields[17]),
        rss_bytes=int(fields[21]) * _PAGE,
        argv=tuple(argv),
    )


def booted() -> float | None:
    """When the container was started, in epoch seconds of its clock; None where process 1 is hidden."""
    init = look(1)
    if init is None:
        return None
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME) - init.start / os.sysconf("SC_CLK_TCK")
    return time.time() - up_s


def environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with."""
    pairs = read_proc(pid, "environ").decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)


def marked() -> dict[str, list[Proc]]:
    """Every live process that carries a run's marker, by the run's folder, oldest first."""
    found: dict[str, list[Proc]] = {}
    for pid in pids():
        if pid == os.getpid() or _MARK not in read_proc(pid, "environ"):
            continue
        marks = environment(pid)
        proc = look(pid)
        folder = marks.get(RUN_DIR, "")
        if proc and marks.get(RUN_ID) == os.path.basename(folder):
            found.setdefault(folder, []).append(proc)
    for procs in found.values():
        procs.sort(key=lambda proc: (proc.start, proc.pid))
    return found


def scope(run_dir: str) -> list[Proc]:
    """The run's live processes, oldest first."""
    return marked().get(run_dir, [])


class Roles(NamedTuple):
    supervisor: Proc | None
    trainer: Proc | None
    workers: list[Proc]
    notifier: Proc | None


def roles(procs: list[Proc], state: dict[str, Any] | None) -> Roles:
    """Who is who in a run's scope.

    The trainer is the supervisor's child; without a supervisor it is the one that wrote `state.json`. A child
    that a dead trainer left has the trainer's command line, so the command line alone decides nothing.
    """
    supervisor = next((proc for proc in procs if "agent.supervise" in proc.argv), None)
    notifier = next((proc for proc in procs if NOTIFIER in proc.argv), None)
    rest = [proc for proc in procs if proc is not supervisor and NOTIFIER not in proc.argv]
    if supervisor:
        trainer = next((proc for proc in rest if proc.ppid == supervisor.pid), None)
    else:
        pid = (state or {}).get("pid")
        trainer = next((proc for proc in rest if proc.pid == pid), None)
        if trainer is None and state is None and rest and "trainer" in rest[0].argv:
            trainer = rest[
                0
            ]  # it has not written its first state: the oldest process is the one that was started
    return Roles(supervisor, trainer, [proc for proc in rest if proc is not trainer], notifier)


def send(proc: Proc, number: int) -> bool:
    """Signal the process unless it is gone or its number has passed to another; False then."""
    try:
        handle = os.pidfd_open(proc.pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return False
    except OSError:
        handle = None  # a kernel before 5.3, or a seccomp filter: the check below must do
    try:
        now = look(proc.pid)
        if now is None or now.start != proc.start:
            return False
        if handle is None:
            os.kill(proc.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"  # a real-time signal


def device_holders(
    prefix: str = "/dev/nvidia", without: frozenset[str] = frozenset()
) -> dict[int, list[str]]:
    """Which processes hold device files that start with `prefix`: pid -> device paths.

    Left out is a process that also holds one of `without`, files or sockets as /proc names them.
    """
    holders: dict[int, list[str]] = {}
    for pid in pids():
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        held = set()
        for descriptor in descriptors:
            try:
                held.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            except OSError:
                continue
        devices = sorted(name for name in held if name.startswith(prefix))
        if devices and pid != os.getpid() and not held & without:
            holders[pid] = devices
    return holders
