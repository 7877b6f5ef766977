"""Is it fine? One pure function from what the agent saw to a word with reasons, tested as data.

The rules are those of docs/architecture.md, "Verdict". All times, `now` too, are of the container's clock: no
comparison mixes two clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from controller import progress, words

Json = dict[str, Any]

EXIT_CODES = {
    "healthy": 0,
    "finished": 0,
    "degraded": 2,
    "stalled": 3,
    "crashed": 4,
    "not-running": 5,
    "stopped": 5,
    "starting": 6,
    "warming-up": 6,
    "unreachable": 7,
}

STALL_FLOOR_S, STALL_CEILING_S, STALL_FACTOR = 60.0, 900.0, 10.0
SILENT_S = 60.0  # its state comes every 2 s; a long compile may hold it up, but not for a minute
LAUNCH_S = 30.0  # between run.json and the first process
FULL_BYTES = 2**20  # with less than this free even the small files of a run fail
PHASE_LIMIT_S = 900.0  # an evaluation, a checkpoint or an end that takes longer deserves a look


@dataclass(frozen=True)
class Verdict:
    """`summary` is the rest of the first line, `since` epoch seconds of the container or None.

    `reasons` say why, `evidence` are lines to quote (a traceback), `mend` is there where the word alone does
    not tell what to do.
    """

    word: str
    summary: str
    since: float | None = None
    reasons: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    mend: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def as_json(self) -> Json:
        return {
            "verdict": self.word,
            "since": self.since,
            "summary": self.summary,
            "reasons": list(self.reasons),
            "evidence": list(self.evidence),
            "mend": self.mend,
        }


def judge(
    snapshot: Json | None,
    *,
    why: str = "",
    mend: str = "",
    last: str = "",
    container_off: bool = False,
    gpus: int | None = None,
) -> Verdict:
    """The verdict on one snapshot. None: there was none, `why` says what stood in the way, `mend` what helps,
    `last` what was seen when there was one.

    `container_off`: the host answered that the container is off, so nothing runs in it. `gpus`: how many the
    inventory expects.
    """
    if snapshot is None:
        reasons = tuple(filter(None, (why, last)))
        if container_off:
            return Verdict("not-running", "the container is off", reasons=reasons, mend=mend)
        return Verdict("unreachable", "nothing is known about the run", reasons=reasons, mend=mend)
    run = snapshot.get("run")
    if not run:
        return Verdict("not-running", "no run yet")
    if run.get("exit"):
        return _ended(snapshot, run, run["exit"])
    trainer = _alive(run, "trainer")
    if trainer is None:
        return _without_trainer(snapshot, run)
    return _living(snapshot, run, trainer, gpus)


def _ended(snapshot: Json, run: Json, end: Json) -> Verdict:
    step = progress.of(run).step
    at = end.get("at")
    if end.get("reason") == "finished":
        return Verdict("finished", f"at step {step}", at)
    if end.get("reason") == "stopped":
        stop = run.get("stop") or {}
        by = _operator(stop.get("operator"))
        reasons = [f"stopped by {by}" if by else "stopped by an operator"]
        if stop.get("reason"):
            reasons[0] += f": {stop['reason']}"
        return Verdict("stopped", f"at step {step}", at, tuple(reasons))
    signal, code = end.get("signal"), end.get("code")
    how = f"killed by {signal}" if signal else f"exit code {code}"
    reasons = [*_causes(run, end, how), *_room(snapshot, run)]
    return Verdict("crashed", f"{how} at step {step}", at, tuple(reasons), _evidence(run))


def _causes(run: Json, end: Json, how: str) -> Iterator[str]:
    """What an exit says about its cause, beyond `how` it ended."""
    traceback = (run.get("log") or {}).get("traceback")
    if end.get("detail") not in (None, "", how):
        yield str(end["detail"])
    if end.get("signal") == "SIGKILL":
        yield "SIGKILL comes from outside: from a person, or from the kernel for want of memory"
    elif end.get("detail"):
        return
    elif end.get("code") == 2:
        yield "the trainer refused to go on; the log's last line says why"
    elif traceback:
        yield str(traceback[-1])


def _without_trainer(snapshot: Json, run: Json) -> Verdict:
    record, state = run.get("record") or {}, run.get("state") or {}
    created = record.get("created")
    now, phase = snapshot["now"], state.get("phase")
    supervisor = _alive(run, "supervisor")
    young = created is not None and now - created < LAUNCH_S
    if supervisor and (not state or (young and phase == "starting")):  # the state may be newer than the look
        return Verdict("starting", "the supervisor is up, the trainer is about to be", created)
    if young and not state:
        return Verdict("starting", "launched, no process yet", created)
    if supervisor:
        # It writes the exit file within a moment, unless it is suspended.
        why = f"the supervisor (pid {supervisor['pid']}) has not written yet how the trainer ended"
    else:
        why = "the supervisor was gone before it, so there is no exit file; its last state says so"
    if phase in ("finished", "stopped"):
        # A trainer that ended in order: its own last word is the truth.
        return Verdict(phase, f"at step {state.get('step') or 0}", state.get("heartbeat"), (why,))
    where = f"in phase {phase} at step {state.get('step') or 0}" if phase else "before its first state"
    if not supervisor:
        why = "neither the supervisor nor the trainer lives and there is no exit file"
    reasons = [why, *_room(snapshot, run)]
    since = state.get("heartbeat") or created
    return Verdict("crashed", f"vanished {where}", since, tuple(reasons), _evidence(run))


def _living(snapshot: Json, run: Json, trainer: Json, gpus: int | None) -> Verdict:
    now, state = snapshot["now"], run.get("state") or {}
    doubts = tuple(_doubts(snapshot, run, trainer, gpus))
    phase = state.get("phase") or "starting"
    since = _since(run, state)
    asides = tuple(_asides(run, state))
    if phase == "starting":
        return _or_degraded("starting", _detail(state, "loading"), since, doubts, asides)
    if phase == "warming-up":
        return _or_degraded("warming-up", _warm_up(state), since, doubts, asides)
    if phase == "training":
        stall = _stall(run, state, trainer, now)
        if stall:
            return stall
    pace = progress.of(run)
    if pace.steady_steps == 0:
        return _or_degraded("warming-up", "no steady step yet", since, doubts, asides)
    return _or_degraded("healthy", _going(phase, state, pace), since, doubts, asides)


def _since(run: Json, state: Json) -> float | None:
    """When it began to be what it is: a checkpoint or an evaluation does not begin a healthy run anew."""
    if state.get("phase") in ("training", "evaluating", "checkpointing") and state.get("training_since"):
        return float(state["training_since"])
    return state.get("phase_since") or (run.get("record") or {}).get("created")


def _or_degraded(
    word: str, summary: str, since: float | None, doubts: tuple[str, ...], asides: tuple[str, ...]
) -> Verdict:
    if doubts:
        return Verdict("degraded", summary, None, doubts + asides)  # since when, one look cannot tell
    return Verdict(word, summary, since, asides)


def _stall(run: Json, state: Json, trainer: Json, now: float) -> Verdict | None:
    """No step for max(60 s, min(15 min, 10 x the median step)); a compile moves the limit to its budget."""
    moved_at = state.get("progress_at") or state.get("phase_since") or now
    quiet = now - moved_at
    step_s = progress.of(run).step_s or state.get("step_time_s") or 0.0
    limit = max(STALL_FLOOR_S, min(STALL_CEILING_S, STALL_FACTOR * step_s))
    compiling = state.get("compile") or {}
    if compiling.get("active"):
        limit = max(limit, compiling.get("budget_s") or 0.0)
    if quiet <= limit:
        return None
    reasons = [f"no step for {words.age(quiet)}, the limit is {words.age(limit)}"]
    if step_s:
        reasons[0] += f" (a step takes {words.duration(step_s)})"
    reasons += _process_doubts(trainer)
    return Verdict("stalled", f"at step {state.get('step') or 0}", moved_at, tuple(reasons), _evidence(run))


def _doubts(snapshot: Json, run: Json, trainer: Json, gpus: int | None) -> Iterator[str]:
    """What makes a living run degraded, each in words."""
    now, state = snapshot["now"], run.get("state") or {}
    if run.get("record") is None:
        yield "its run.json is gone or damaged, perhaps its whole folder: what it does now may be lost"
    yield from _process_doubts(trainer)
    heard = state.get("heartbeat")
    if heard is not None and now - heard > SILENT_S:
        yield f"the trainer has written no state for {words.age(now - heard)} (every 2s is normal)"
    phase, since = state.get("phase"), state.get("phase_since")
    budget = (state.get("compile") or {}).get("budget_s") if phase == "warming-up" else PHASE_LIMIT_S
    if phase not in (None, "training") and since is not None and budget and now - since > budget:
        yield f"{phase} for {words.age(now - since)}, longer than {words.age(budget)}"
    for line in (state.get("kernels") or {}).get("slow") or []:
        yield f"reference kernels: {line}"
    yield from _room(snapshot, run)
    table = snapshot.get("gpus") or {}
    if table.get("status") in ("timeout", "error"):
        yield f"nvidia-smi: {table.get('detail') or table['status']}"
    elif gpus is not None and len(table.get("rows") or []) < gpus:
        yield f"{len(table.get('rows') or [])} of {words.plural(gpus, 'GPU')} of the inventory are here"


def _process_doubts(trainer: Json) -> list[str]:
    letter = str(trainer.get("state", ""))[:1]
    if letter in ("T", "t"):
        return [f"the trainer is suspended by a signal; invoke exec 'kill -CONT {trainer['pid']}' wakes it"]
    return []


def _asides(run: Json, state: Json) -> Iterator[str]:
    """Worth saying, no reason to worry."""
    if not _alive(run, "supervisor"):
        yield "the supervisor is gone: the run goes on, but nothing will write down how it ends"
    for note in state.get("notes") or []:
        yield str(note)


def _room(snapshot: Json, run: Json) -> Iterator[str]:
    """A full disk loses a checkpoint, so it is said while there is still something to do about it."""
    sizes = [entry.get("bytes") or 0 for entry in run.get("checkpoints") or []]
    disks = snapshot.get("disks") or []
    if not disks:
        return
    folder = str((run.get("log") or {}).get("path") or "")
    over = [disk for disk in disks if folder.startswith(str(disk["path"]))]
    # One row stands for a whole file system: without one of its own, the run shares the first.
    disk = max(over, key=lambda disk: len(disk["path"]), default=disks[0])
    need = 2 * max(sizes, default=0)
    if disk["free_bytes"] >= max(need, FULL_BYTES):
        return
    wanted = f", two checkpoints need {words.size(need)}" if need else ""
    yield f"{disk['path']} has {words.size(disk['free_bytes'])} free{wanted}"


def _warm_up(state: Json) -> str:
    compiling = state.get("compile") or {}
    if not compiling.get("count") and not compiling.get("active"):
        return _detail(state, "no step yet")
    count, seconds = int(compiling.get("count") or 0), float(compiling.get("seconds") or 0)
    text = f"{words.plural(count, 'compile')} in {words.duration(seconds)}"
    return f"{text}, compiling now" if compiling.get("active") else text


def _going(phase: str, state: Json, pace: progress.Progress) -> str:
    if phase == "training":
        return f"{words.rate(pace.tokens_per_s or 0)}, step {pace.step} of {pace.steps}"
    return f"{phase} at step {pace.step} of {pace.steps}"


def _detail(state: Json, otherwise: str) -> str:
    return str(state.get("detail") or otherwise)


def _alive(run: Json, role: str) -> Json | None:
    for process in run.get("processes") or []:
        if process.get("role") == role and str(process.get("state", ""))[:1] not in ("Z", "X"):
            return dict(process)
    return None


def _evidence(run: Json) -> tuple[str, ...]:
    log = run.get("log") or {}
    return tuple(log.get("traceback") or (log.get("tail") or [])[-8:])


def _operator(operator: Any) -> str:
    if isinstance(operator, dict) and operator.get("user"):
        return f"{operator['user']}@{operator.get('host', '?')}"
    return str(operator or "")
