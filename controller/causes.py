"""What makes a living run degraded: each cause with its evidence in numbers and with the mend.

Pure functions of a snapshot, gravest first. A cause is only called one where somebody can do something about
it: what a run does at full load, or what no other split of its GPUs would change, is none.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from controller import attempts, gpu_words, progress, words

Json = dict[str, Any]

SILENT_S = 60.0  # its state comes every 2 s; a long compile may hold it up, but not for a minute
PHASE_LIMIT_S = 900.0  # an evaluation, a checkpoint or an end that takes longer deserves a look
# With less than this free even a log and the small files of a run may fail. `doctor` goes by it, too.
FULL_BYTES = 512 * 2**20
FULL_INODES = 1000
VMID = "VMID"  # stands in a mend for the container's number, which `verdict.judge` knows
RESTART = "invoke restart"  # in a mend it means this run, which `verdict.judge` names where it must be
LOG_BYTES_A_MINUTE, LOG_LEAST_S = 10 * 2**20, 60.0  # a step line has 100 bytes
RECOMPILES_OF, RECOMPILES_SHARE, RECOMPILES_LEAST = 20, 0.5, 6  # steps that are looked at
LOADER_BUSY, STARVES = 0.9, 0.1  # shares of a thread's time; the second is the trainer's own
SPLIT_GAIN = 0.10  # what another split must promise; less is said on the `split` line only
SLOW = 0.85  # of the baseline
# What nvidia-smi says when a card no longer answers
_LOST = ("is lost", "requires reset", "Unable to determine the device handle", "fallen off the bus")

_FOLDERS = re.compile(r"/\S*/")


@dataclass(frozen=True)
class Cause:
    """`kind` is for scripts and never changes, `says` is one line with the numbers, `mend` what to do."""

    kind: str
    says: str
    mend: str = ""


def of(snapshot: Json, run: Json, trainer: Json, gpus: int | None) -> list[Cause]:
    """`gpus`: how many the inventory expects; without it, as many as the run began with."""
    state = run.get("state") or {}
    return [
        *suspended(trainer),
        *_record(run),
        *_silent(state, snapshot["now"]),
        *_gpus(snapshot, run, gpus),
        *room(snapshot, run),
        *_log(run),
        *_overdue(state, snapshot["now"]),
        *_code(run, state),
        *_flow(run, state),
        *_slow(run),
    ]


def suspended(trainer: Json) -> Iterator[Cause]:
    if str(trainer.get("state", ""))[:1] in ("T", "t"):
        wake = f"invoke exec 'kill -CONT {trainer['pid']}' wakes it"
        yield Cause("suspended", "the trainer is suspended by a signal", wake)


def restart(snapshot: Json, run: Json, own: tuple[str, Json] | None) -> str:
    """The shortest command that goes on with this run: a plain one starts the box's `own` recipe and
    overrides at their newest checkpoint, and `--from` the run's release, which may be older than the current.
    """
    record = run.get("record") or {}
    if own is None:  # what the box says is not known here
        plain = not record.get("overrides")
    else:
        plain = (record.get("recipe"), record.get("overrides") or {}) == own
    if record.get("id") is None or (plain and is_newest(snapshot, run)):
        return RESTART
    current = (snapshot.get("release") or {}).get("current")
    moved = current and record.get("release") not in (None, current)
    more = " --release current" * bool(moved) + " --from-scratch" * (not has_saved(run))
    return f"{RESTART} --from {record['id']}{more}"


def is_newest(snapshot: Json, run: Json) -> bool:
    """Whether this is the run that a command without --run means."""
    runs = snapshot.get("runs") or []
    return not runs or bool(runs[0]["id"] == run.get("id"))


def has_saved(run: Json) -> bool:
    """Whether there is a checkpoint to go on from, its own or that of the run before it."""
    return bool(run.get("checkpoints") or (run.get("record") or {}).get("resume_from"))


def _record(run: Json) -> Iterator[Cause]:
    if (run.get("record") or {}).get("id") is None:
        says = "its run.json is gone or damaged, perhaps its whole folder: what it does now may be lost"
        yield Cause("record-lost", says, "invoke abort, find out who removed it, invoke restart")


def _silent(state: Json, now: float) -> Iterator[Cause]:
    heard = state.get("heartbeat")
    if heard is not None and now - heard > SILENT_S:
        says = f"the trainer has written no state for {words.age(now - heard)} (every 2s is normal)"
        yield Cause("silent", says, "invoke logs   |   invoke attach   |   invoke restart")


def _gpus(snapshot: Json, run: Json, wanted: int | None) -> Iterator[Cause]:
    xid = grave_xid(snapshot, run)
    if xid is not None:
        yield Cause("xid", said(xid, snapshot["now"]), f"invoke abort; {reset(xid['bus'])}")
    table = snapshot.get("gpus")
    if table is None:
        return
    rows, detail = table.get("rows") or [], str(table.get("detail") or "")
    if table.get("status") in ("timeout", "error"):
        if any(mark in detail for mark in _LOST):
            yield Cause("gpu-lost", f"nvidia-smi: {detail}", f"invoke abort; {reset()}")
        else:
            yield Cause("nvidia-smi", f"nvidia-smi: {detail or table['status']}", "invoke doctor")
        return
    began = ((run.get("record") or {}).get("gpus") or {}).get("count")
    whose = "of the inventory" if wanted is not None else "that the run began with"
    expected = int(wanted if wanted is not None else began or 0)
    if len(rows) < expected:
        says = f"{len(rows)} of {words.plural(expected, 'GPU')} {whose} are here"
        yield Cause(
            "gpu-missing", says, "invoke doctor tells whether the host still sees all, and what to do"
        )
    lost = [row for row in rows if row.get("fault")]
    if lost:
        yield Cause(
            "gpu-lost", f"GPU {gpu_words.indices(lost)}: {lost[0]['fault']}", f"invoke abort; {reset()}"
        )
    broken = [row for row in rows if row.get("ecc_uncorrectable")]
    if broken:
        count = sum(row["ecc_uncorrectable"] for row in broken)
        says = f"GPU {gpu_words.indices(broken)}: {words.plural(count, 'uncorrectable memory error')}"
        yield Cause("gpu-memory-errors", f"{says}: its numbers cannot be trusted", f"invoke abort; {reset()}")
    slowed = gpu_words.slowed(rows)
    if slowed:
        mend = "look at fans, room and power supplies: all GPUs wait for the slowest"
        yield Cause("gpu-throttled", gpu_words.slowdown(slowed), mend)


def reset(card: str = "N") -> str:
    """How a card comes back; `card` is its bus id, or its number on the host."""
    return f"on the Proxmox host: nvidia-smi --gpu-reset -i {card}, or reboot it; then invoke restart"


def grave_xid(snapshot: Json, run: Json) -> Json | None:
    """The last grave error that the driver wrote into the kernel's log since the run began."""
    created = (run.get("record") or {}).get("created")
    since = [each for each in snapshot.get("xids") or [] if created and each["at"] >= created]
    grave = [each for each in since if each["number"] in gpu_words.GRAVE_XIDS]
    return grave[-1] if grave else None


def said(xid: Json, now: float) -> str:
    """`Xid 79 of 0000:43:00 5m ago: the GPU has fallen off the bus`."""
    meaning = gpu_words.xid(xid["number"])
    return f"Xid {xid['number']} of {xid['bus']} {words.age(now - xid['at'])} ago: {meaning}"


def room(snapshot: Json, run: Json) -> Iterator[Cause]:
    """A full disk loses a checkpoint, so it is said while there is still something to do about it."""
    sizes = [entry.get("bytes") or 0 for entry in run.get("checkpoints") or []]
    disks = snapshot.get("disks") or []
    if not disks:
        return
    disk = under(disks, str((run.get("log") or {}).get("path") or ""))
    need, mend = 2 * max(sizes, default=0), "invoke runs.prune --keep 5, or give the container more disk"
    if disk["free_bytes"] < max(need, FULL_BYTES):
        wanted = f", two checkpoints need {words.size(need)}" if need else ""
        yield Cause("disk", f"{disk['path']} has {words.size(disk['free_bytes'])} free{wanted}", mend)
    if disk.get("inodes_total") and disk["inodes_free"] < FULL_INODES:
        says = f"{disk['path']} has room for {words.plural(disk['inodes_free'], 'file')} more"
        yield Cause("inodes", says, mend)


def under(disks: list[Json], path: str) -> Json:
    """The row of the file system that `path` lies on: one stands for a whole one, under the first folder of
    ours that is there, so what has no row of its own shares the first."""
    over = [disk for disk in disks if path.startswith(str(disk["path"]))]
    return max(over, key=lambda disk: len(disk["path"]), default=disks[0])


def _log(run: Json) -> Iterator[Cause]:
    grown = (run.get("log") or {}).get("growth")
    if not grown or grown["seconds"] < LOG_LEAST_S:
        return
    a_minute = 60 * grown["bytes"] / grown["seconds"]
    if a_minute > LOG_BYTES_A_MINUTE:
        says = f"the log grows by {words.size(a_minute)} a minute: something repeats itself"
        yield Cause("log-growth", says, "invoke logs --lines 20 shows what; the log keeps its end only")


def _overdue(state: Json, now: float) -> Iterator[Cause]:
    phase, since = state.get("phase"), state.get("phase_since")
    if phase in (None, "training") or since is None:
        return
    if phase == "warming-up":
        yield from _stuck(state, now, since)
        return
    # Reading a model may take as long as it takes while it moves; the others tell of no progress.
    since = max(since, state.get("progress_at") or since) if phase == "starting" else since
    if now - since > PHASE_LIMIT_S:
        says = f"{phase} for {words.age(now - since)}, longer than {words.age(PHASE_LIMIT_S)}"
        if phase == "starting":
            says = f"starting, and nothing has moved for {words.age(now - since)}"
        yield Cause("overdue", says, "invoke logs   |   invoke attach   |   invoke restart")


def _stuck(state: Json, now: float, since: float) -> Iterator[Cause]:
    """A warm-up may take an hour as long as compiles come and go; one that does not end is another matter."""
    compiling = state.get("compile") or {}
    budget, moved = compiling.get("budget_s"), compiling.get("moved_at")
    if moved is not None:
        moved = max(since, moved, 0 if compiling.get("active") else state.get("progress_at") or 0)
    quiet = now - (since if moved is None else moved)
    if not budget or quiet <= budget:
        return
    count, seconds = int(compiling.get("count") or 0), float(compiling.get("seconds") or 0)
    if moved is None:
        says = f"warming-up for {words.age(quiet)}, longer than {words.age(budget)}"
    elif compiling.get("active"):
        says = f"one compile has run for {words.age(quiet)}, the budget is {words.age(budget)}"
        if count > 1:
            others = max(0.0, seconds - quiet) / (count - 1)
            says += f"; the {count - 1} before it took {words.duration(others)} on average"
    else:
        says = f"warming-up, and nothing has moved for {words.age(quiet)}"
    yield Cause("stuck-compile", says, "invoke logs   |   invoke restart --fresh-cache")


def _code(run: Json, state: Json) -> Iterator[Cause]:
    kernels, compiling = state.get("kernels") or {}, state.get("compile") or {}
    for line in kernels.get("slow") or []:
        mend = "install what the line names, then invoke restart; invoke doctor proves it"
        yield Cause("reference-kernels", f"reference kernels: {line}", mend)
    fallbacks = compiling.get("fallbacks") or []
    if fallbacks:
        more = f"; and {len(fallbacks) - 1} more" if len(fallbacks) > 1 else ""
        shown = _FOLDERS.sub("", fallbacks[0])
        yield Cause("eager-fallback", f"eager fallback: {shown}{more}", _ANEW)
    elif kernels.get("compiled") is False and "cuda" in str(state.get("topology")):
        yield Cause(
            "eager-fallback", "eager fallback: nothing is compiled", "set compile: auto in the recipe"
        )
    lines = progress.after_first(run)[-RECOMPILES_OF:]
    compiled = sum(bool(line.get("compile")) for line in lines)
    if len(lines) >= RECOMPILES_LEAST and compiled >= RECOMPILES_SHARE * len(lines):
        says = f"recompiling: {compiled} of the last {len(lines)} steps compiled something"
        yield Cause("recompiling", says, f"invoke logs --grep '(?i)compil' tells what; {_ANEW}")


_ANEW = "invoke restart --fresh-cache; if it comes again, its log belongs to a bug report"


def _flow(run: Json, state: Json) -> Iterator[Cause]:
    flow = state.get("pipeline") or {}
    wait = flow.get("wait") or {}
    loader = _busy(run, "loader")
    if loader is not None and loader >= LOADER_BUSY and (wait.get("targets") or 0) >= STARVES:
        says = f"the loader starves the targets: it works {100 * loader:.0f} % of the time, they wait "
        mend = f"more CPU cores for the container: on the Proxmox host: pct set {VMID} -cores N"
        yield Cause("loader-starves", f"{says}{100 * wait['targets']:.0f} %", mend)
        return  # another split would not feed anybody
    side, advice, gain = flow.get("starving"), flow.get("advice"), flow.get("gain") or 0.0
    if side and advice and gain >= SPLIT_GAIN:
        waits = f"{100 * (wait.get(side) or 0):.0f} %"
        says = (
            f"the {side} starve: they wait {waits} of the time; {advice} would be {100 * gain:.0f} % faster"
        )
        yield Cause("side-starves", says, f"{RESTART} --set topology.split={advice}")


def _busy(run: Json, thread: str) -> float | None:
    """Mean share over the last steps that a thread was at work."""
    lines = [line.get("busy") for line in attempts.steps(run)[1][-progress.WINDOW :]]
    shares = [line.get(thread) for line in lines if isinstance(line, dict)]
    known = [share for share in shares if isinstance(share, int | float)]
    return statistics.fmean(known) if known else None


def _slow(run: Json) -> Iterator[Cause]:
    share, baseline = against_baseline(run), run.get("baseline") or {}
    if share is None or share >= SLOW:
        return
    says = f"{100 * share:.0f} % of the baseline {words.rate(baseline['tokens_per_s'])} of {baseline['run']}"
    flow = (run.get("state") or {}).get("pipeline") or {}
    driver = ((run.get("record") or {}).get("gpus") or {}).get("driver")
    changes = [
        f"{name} {before} then, {now} now"
        for name, before, now in (
            ("split", baseline.get("split"), flow.get("split")),
            ("driver", baseline.get("driver"), driver),
        )
        if before and now and before != now
    ]
    mine = run.get("id")
    mend = f"invoke runs.diff {baseline['run']} {mine}" if baseline["run"] != mine else "invoke doctor"
    yield Cause("slow", f"slow: {'; '.join([says, *changes])}", mend)


def against_baseline(run: Json) -> float | None:
    """The median rate of the last WINDOW steady steps as a share of the baseline's; None while fewer."""
    baseline = (run.get("baseline") or {}).get("tokens_per_s")
    rates = progress.rates(run)
    if not baseline or len(rates) < progress.WINDOW:
        return None
    return statistics.median(rates) / float(baseline)
