"""`nvidia-smi` can hang in the driver for ever: it has a deadline, and no second one joins a hung one.

NVML gives host process ids, which mean nothing inside an LXC container (nvidia-docker issue 179): who holds
a GPU is read from the open device files instead (procs.device_holders).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import select
import subprocess
import time
from typing import Any, Iterator, NamedTuple, Optional, Sequence

from agent import procs
from agent.files import number, read_json

# nvidia-smi's name -> ours; whole numbers unless listed in _TEXT or _FLOAT
_PLAIN = {
    "index": "index",
    "name": "name",
    "driver_version": "driver",
    "memory.used": "memory_used_mib",
    "memory.total": "memory_total_mib",
    "utilization.gpu": "utilization_pct",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
}
# One unknown name spoils the whole answer, so a driver is asked in turn for all, for all by the name that 535
# gave it (until now it understands the old one too), and for what every driver has.
_HEALTH = {"ecc.errors.uncorrected.volatile.total": "ecc_uncorrectable"}
_DIALECTS = (
    {**_PLAIN, **_HEALTH, "clocks_throttle_reasons.active": "throttle"},
    {**_PLAIN, **_HEALTH, "clocks_event_reasons.active": "throttle"},
    _PLAIN,
)
_UNKNOWN = "is not a valid field"
_TEXT = ("name", "driver")
_FLOAT = ("power_w", "power_limit_w")
_FAULT = re.compile(r"\[(GPU is lost|GPU requires reset)\]", re.IGNORECASE)
_UNREADABLE = "Unknown Error"  # of a field that a card lacks as well, so it is a fault only of its memory
# nvml.h, nvmlClocksEventReason*, by bit, named as in the XML of `nvidia-smi -q -x`
_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clocks_setting",
)
DEVICES = "/dev/nvidia"
ASKERS = ("nvidia-smi", "sh")  # the programs that open device files for a look (gpu_health.ask_nodes: sh)
DEADLINE_S = 5.0  # H200s answer in 0.1 s; what takes longer hangs, and who comes later does not wait for it


class Reply(NamedTuple):
    """`status` is `ok` (with `text`, the output), `absent`, `timeout` or `error` (`detail` says why)."""

    status: str
    detail: str
    text: str = ""


class Query:
    """A question in flight. Of all looks at one container only one at a time has a child that asks: the child
    holds a lock that goes with it, however the look that started it has ended."""

    def __init__(self, run_root: str, deadline_s: float, argv: Sequence[str], dialect: int = 0) -> None:
        self.run_root, self.argv, self.program, self.dialect = run_root, argv, argv[0], dialect
        self.began = time.monotonic()
        self.deadline = self.began + deadline_s
        self.note = _note(run_root, self.program)
        self.child: subprocess.Popen[bytes] | None = None
        self.known: Reply | None = None

    def begin(self) -> bool:
        """Start the program, unless that of another look is still at work; whether there is nothing to wait
        for any more but an answer."""
        if self.child is not None or self.known is not None:
            return True
        lock = _locked(self.note)
        if lock is not None:
            try:
                self._spawn(lock)
            finally:
                os.close(lock)  # the child has its own
            return True
        noted = read_json(self.note) or {}
        age = time.monotonic() - (number(noted, "since") or time.monotonic())
        if age > DEADLINE_S and ("pid" not in noted or _living(noted) is not None):
            self.known = Reply("timeout", _hanging(self.program, self.note))
        return self.known is not None

    def _spawn(self, lock: int) -> None:
        asked = {"since": time.monotonic()}
        _write_note(lock, asked)  # first: who is killed before the second leaves a child whose age is known
        try:
            self.child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
        except OSError:
            self.known = _without_program(self.program)
            return
        _write_note(lock, {**asked, "pid": self.child.pid})


def table(dialect: int = 0) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(_DIALECTS[dialect])}", "--format=csv,noheader,nounits")


def ask(run_root: str, deadline_s: float, argv: Sequence[str] = table(), dialect: int = 0) -> Query:
    """Start a program that talks to the driver and return at once, so that other looks go on beside it."""
    query = Query(run_root, deadline_s, argv, dialect)
    query.begin()
    return query


def settled(query: Query) -> bool:
    """Whether `reply` would return at once."""
    if time.monotonic() > query.deadline:
        return True
    return query.begin() and (query.child is None or query.child.poll() is not None)


def reply(query: Query) -> Reply:
    """What it said; past the deadline the child is killed, and not waited for."""
    while not query.begin():
        if time.monotonic() > query.deadline:
            return Reply("timeout", _hanging(query.program, query.note))
        time.sleep(0.02)
    if query.known is not None or query.child is None:
        return query.known or Reply("absent", "")
    child = query.child
    assert child.stdout is not None
    output = b""
    while True:
        left = query.deadline - time.monotonic()
        if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
            return _give_up(query, child)
        part = os.read(child.stdout.fileno(), 1 << 16)
        if not part:
            break
        output += part
    child.stdout.close()
    try:
        status = child.wait(max(0.1, query.deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return _give_up(query, child)
    text = output.decode("utf-8", "replace")
    if status != 0:
        said = " ".join(text.split())[:200] or "it said nothing"
        return Reply("error", f"{query.program} ended with {status}: {said}")
    return Reply("ok", "", text)


def answer(query: Query) -> dict[str, Any]:
    """`{status, detail, rows[]}` of a query for `table()`."""
    said = reply(query)
    if said.status == "error" and _UNKNOWN in said.detail and query.dialect + 1 < len(_DIALECTS):
        left, dialect = max(1.0, query.deadline - time.monotonic()), query.dialect + 1
        return answer(ask(query.run_root, left, table(dialect), dialect))
    rows = [_row(line, _DIALECTS[query.dialect]) for line in said.text.splitlines() if line.strip()]
    return {"status": said.status, "detail": said.detail, "rows": rows}


def query(run_root: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    return answer(ask(run_root, deadline_s))


def holders(run_root: str, but: set[int]) -> list[dict[str, Any]]:
    """Processes that hold a GPU's device file: `{pid, command, devices}`.

    Left out are `but` and what a look has started: a question's child holds its lock, which nobody else has.
    """
    locks = frozenset(name for program in ASKERS for name in _lock_names(_note(run_root, program)))
    held = procs.device_holders(DEVICES, locks)
    found = [(procs.look(pid), devices) for pid, devices in held.items() if pid not in but]
    return [{"pid": proc.pid, "command": proc.command, "devices": devices} for proc, devices in found if proc]


def _without_program(program: str) -> Reply:
    if glob.glob(DEVICES + "[0-9]*"):
        return Reply("error", f"{DEVICES}* is here, but {program} is not installed")
    return Reply("absent", "no NVIDIA GPU in this container")


def _row(line: str, fields: dict[str, str]) -> dict[str, Any]:
    """`fault` is the driver's word on a GPU that it cannot ask any more; `throttle` lists what slows it."""
    fault = _FAULT.search(line)
    row: dict[str, Any] = {"fault": fault[1] if fault else None, "throttle": None, "ecc_uncorrectable": None}
    for name, value in zip(fields.values(), line.split(", ")):  # noqa: B905 - strict= came with 3.10
        if name in _TEXT:
            row[name] = value.strip()
            continue
        try:
            if name == "throttle":
                row[name] = _reasons(int(value, 16))
            else:
                row[name] = float(value) if name in _FLOAT else int(float(value))
        except ValueError:
            row[name] = None  # "[N/A]" or "[Unknown Error]"
    if row["fault"] is None and row.get("memory_used_mib") is None and _UNREADABLE in line:
        row["fault"] = _UNREADABLE
    return row


def _reasons(bits: int) -> list[str]:
    return [name for place, name in enumerate(_REASONS) if bits >> place & 1]


def _give_up(query: Query, child: subprocess.Popen[bytes]) -> Reply:
    child.kill()
    if child.stdout is not None:
        child.stdout.close()
    return Reply("timeout", f"{query.program} did not answer in time")


def _note(run_root: str, program: str) -> str:
    return os.path.join(run_root, f"{program}.json")


def _write_note(lock: int, facts: dict[str, float]) -> None:
    with contextlib.suppress(OSError):  # on a full disk, or where it is a name, the lock still locks
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(facts).encode(), 0)


def _socket_name(note: str) -> bytes:
    return b"\0" + os.fsencode(note)[-100:]  # abstract, of 107 bytes at most


def _lock_names(note: str) -> Iterator[str]:
    """The lock of `_locked` as /proc/PID/fd names it: the file, or the socket of that name."""
    yield os.path.realpath(note)
    name = _socket_name(note).replace(b"\0", b"@")
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as sockets:
        for line in sockets:
            fields = line.rstrip(b"\n").split(None, 7)  # the last two: inode and, where it has one, name
            if fields[7:] == [name]:
                yield f"socket:[{int(fields[6])}]"


def _locked(note: str) -> Optional[int]:
    """A descriptor that holds the lock while it, or a child's copy, is open; None: another has it.

    Where the file cannot be made (nothing was started since the container's boot, or its disk is full) a
    socket's name is the lock: a look makes no folder.
    """
    try:
        handle = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        import socket  # 5 ms, of the 60 that a look may take, for this alone

        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(_socket_name(note))
        except OSError:
            name.close()
            return None
        return name.detach()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _hanging(program: str, note: str) -> str:
    """Words about the child of an earlier look that still holds the lock: it cannot die (state D)."""
    noted = read_json(note) or {}
    proc, since = _living(noted), number(noted, "since")
    who = f" (pid {proc.pid}, state {proc.state})" if proc else ""
    age = f" for {int(time.monotonic() - since)} s" if since is not None else ""
    return f"{program} hangs in the driver{age}{who}"


def _living(noted: dict[str, Any]) -> procs.Proc | None:
    """The noted process: the note of one that is gone is about to be written anew."""
    pid = noted.get("pid")
    return procs.look(pid) if isinstance(pid, int) else None
