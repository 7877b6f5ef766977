"""`nvidia-smi` can hang in the driver for ever: it has a deadline, and no second one joins a hung one.

NVML gives host process ids, which mean nothing inside an LXC container (nvidia-docker issue 179): who holds
a GPU is read from the open device files instead (procs.device_holders).
"""

from __future__ import annotations

import glob
import os
import re
import select
import subprocess
import time
from typing import Any, NamedTuple, Sequence

from agent import procs
from agent.files import number, read_json, remove_quietly, write_json

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
    "display_clock_setting",
)
DEVICES = "/dev/nvidia"


class Reply(NamedTuple):
    """`status` is `ok` (with `text`, the output), `absent`, `timeout` or `error` (`detail` says why)."""

    status: str
    detail: str
    text: str = ""


class Query(NamedTuple):
    """A question in flight: the child, or the answer that was already known."""

    program: str
    child: subprocess.Popen[bytes] | None
    known: Reply | None
    deadline: float
    mark: str
    dialect: int = 0


def table(dialect: int = 0) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(_DIALECTS[dialect])}", "--format=csv,noheader,nounits")


def ask(run_root: str, deadline_s: float, argv: Sequence[str] = table()) -> Query:
    """Start a program that talks to the driver and return at once, so that other looks go on beside it."""
    program, deadline = argv[0], time.monotonic() + deadline_s
    mark = os.path.join(run_root, f"{program}.json")
    hanging = _hanging(program, mark)
    if hanging:
        return Query(program, None, Reply("timeout", hanging), deadline, mark)
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError:
        return Query(program, None, _without_program(program), deadline, mark)
    return Query(program, child, None, deadline, mark)


def settled(query: Query) -> bool:
    """Whether `reply` would return at once."""
    return query.child is None or query.child.poll() is not None or time.monotonic() > query.deadline


def reply(query: Query) -> Reply:
    """What it said; past the deadline the child is killed, remembered, and not waited for."""
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
        again = ask(os.path.dirname(query.mark), left, table(dialect))
        return answer(again._replace(dialect=dialect))
    rows = [_row(line, _DIALECTS[query.dialect]) for line in said.text.splitlines() if line.strip()]
    return {"status": said.status, "detail": said.detail, "rows": rows}


def query(run_root: str, deadline_s: float = 5.0) -> dict[str, Any]:
    return answer(ask(run_root, deadline_s))


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
    proc = procs.look(child.pid)
    child.kill()
    if proc:
        try:
            write_json(query.mark, {"pid": proc.pid, "start": proc.start, "since": time.time()})
        except OSError:
            pass  # without the note a later look starts another: no reason to fail this one
    return Reply("timeout", f"{query.program} did not answer in time")


def _hanging(program: str, mark: str) -> str:
    """Words about an earlier child of ours that cannot die (state D), or an empty text."""
    noted = read_json(mark)
    if noted is None:
        return ""
    proc = procs.look(noted["pid"]) if isinstance(noted.get("pid"), int) else None
    if proc is None or proc.start != noted.get("start"):
        remove_quietly(mark)
        return ""
    age = int(time.time() - (number(noted, "since") or 0))
    return f"{program} hangs in the driver for {age} s (pid {proc.pid}, state {proc.state})"
