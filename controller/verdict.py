"""Is it fine? One pure function from what the agent saw to a word with reasons, tested as data.

The rules are those of docs/architecture.md, "Verdict". All times, `now` too, are of the container's clock: no
comparison mixes two clocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controller import attempts, causes, crash, progress, words
from controller.causes import RESTART, Cause

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
UNSENT = "a message did not get out"  # how the reason begins that says so
LAUNCH_S = 30.0  # between run.json and the first process
_RESTARTS, _SCRATCH = re.compile(rf"{RESTART}(?! --from )"), " --from-scratch"
_HANG = re.compile(r"no thread has moved for (\d+) s:")


@dataclass(frozen=True)
class Verdict:
    """`summary` is the rest of the first line, `since` epoch seconds of the container or None.

    `reasons` say why, `causes` are the kinds of the causes among them (causes.py, crash.py), `evidence` are
    lines to quote (a traceback), `mend` is there where the word alone does not tell what to do. `last` is
    what was known before the box became unreachable: `word run step age_s`. `again` goes on with the run.
    """

    word: str
    summary: str
    since: float | None = None
    reasons: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    mend: str = ""
    causes: tuple[str, ...] = ()
    last: Json | None = None
    again: str = RESTART

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
            "causes": list(self.causes),
            "last": self.last,
        }


def judge(
    snapshot: Json | None,
    *,
    why: str = "",
    mend: str = "",
    last: Json | None = None,
    container_off: bool = False,
    gpus: int | None = None,
    vmid: int | None = None,
    own: tuple[str, Json] | None = None,
) -> Verdict:
    """The verdict on one snapshot. None: there was none, `why` says what stood in the way, `mend` what helps,
    `last` (`word run step age_s`) what was seen when there was one.

    `container_off`: the host answered that the container is off, so nothing runs in it. `gpus`: how many the
    inventory expects, `vmid`: the container's number, for the mend, `own`: the box's recipe and overrides.
    """
    found = _judge(snapshot, why, mend, last, container_off, gpus)
    run = (snapshot or {}).get("run")
    again = causes.restart(snapshot, run, own) if snapshot and run else RESTART
    told = _RESTARTS.sub(again, found.mend).replace(_SCRATCH * 2, _SCRATCH)
    return replace(found, mend=told if vmid is None else told.replace(causes.VMID, str(vmid)), again=again)


def _judge(
    snapshot: Json | None, why: str, mend: str, last: Json | None, container_off: bool, gpus: int | None
) -> Verdict:
    if snapshot is None:
        before = _last_seen(last) if last else ""
        if container_off:
            reasons = tuple(filter(None, (why, before)))
            return Verdict("not-running", "the container is off", reasons=reasons, mend=mend, last=last)
        summary, reasons = before or "nothing is known about the run", tuple(filter(None, (why,)))
        return Verdict("unreachable", summary, reasons=reasons, mend=mend, last=last)
    run = snapshot.get("run")
    if not run:
        return Verdict("not-running", "no run yet")
    if (run.get("exit") or {}).get("reason"):
        return _ended(snapshot, run, run["exit"])
    trainer = attempts.alive(run, "trainer")
    if trainer is None:
        return _without_trainer(snapshot, run)
    return _living(snapshot, run, trainer, gpus)


def _last_seen(last: Json) -> str:
    return f"last seen {last['word']} {words.age(last['age_s'])} ago: {last['run']} at step {last['step']}"


def _because(
    word: str,
    summary: str,
    since: float | None,
    found: Sequence[Cause],
    more: Sequence[str] = (),
    evidence: tuple[str, ...] = (),
) -> Verdict:
    """A verdict with causes, the gravest first: the first mend is the one to try."""
    reasons = tuple(dict.fromkeys((*(cause.says for cause in found), *more)))
    kinds = tuple(dict.fromkeys(cause.kind for cause in found))
    mend = next((cause.mend for cause in found if cause.mend), "")
    return Verdict(word, summary, since, reasons, evidence, mend, kinds)


def _ended(snapshot: Json, run: Json, end: Json) -> Verdict:
    step = progress.of(run).step
    at = end.get("at")
    if end.get("reason") == "finished":
        return Verdict("finished", f"at step {step}", at, tuple(_messages(run)))
    if end.get("reason") == "stopped":
        stop = run.get("stop") or {}
        by = _operator(stop.get("operator"))
        nobody = "asked to stop by SIGTERM, by nobody on record: a shutdown of the container does that"
        reasons = [f"stopped by {by}" if by else nobody]
        if stop.get("reason"):
            reasons[0] += f": {stop['reason']}"
        reasons += attempts.cut_short(run)
        return Verdict("stopped", f"at step {step}", at, tuple(reasons))
    signal, code = end.get("signal"), end.get("code")
    how = f"killed by {signal}" if signal else f"exit code {code}"
    found = crash.explain(snapshot, run, end, how)
    more = (*attempts.given_up(run), *_messages(run))
    return _because("crashed", f"{how} at step {step}", at, found, more, _evidence(run))


def _without_trainer(snapshot: Json, run: Json) -> Verdict:
    record, state = run.get("record") or {}, run.get("state") or {}
    created = record.get("created")
    now, phase = snapshot["now"], state.get("phase")
    supervisor = attempts.alive(run, "supervisor")
    young = created is not None and abs(now - created) < LAUNCH_S  # a clock may be set back
    if supervisor and attempts.pending(run):
        return _between_attempts(snapshot, run)
    if supervisor and (not state or (young and phase == "starting")):  # the state may be newer than the look
        return Verdict("starting", "the supervisor is up, the trainer is about to be", created)
    launching = not record and (snapshot.get("lock") or {}).get("verb") in (
        "start",
        "restart",
    )  # its folder alone
    if (young or launching) and not state and not run.get("metrics"):
        return Verdict("starting", "launched, no process yet", created)
    if supervisor and attempts.limit(run) and phase not in ("finished", "stopped"):
        return Verdict("degraded", "the trainer is gone, its supervisor is about to say what follows")
    if supervisor:
        # It writes the exit file within a moment, unless it is suspended.
        why = f"the supervisor (pid {supervisor['pid']}) has not written yet how the trainer ended"
    else:
        why = "no exit file can be read (its supervisor was gone first); its last state says so"
    if phase in ("finished", "stopped"):
        # A trainer that ended in order: its own last word is the truth.
        return Verdict(phase, f"at step {state.get('step') or 0}", state.get("heartbeat"), (why,))
    lived = run.get("metrics") or run.get("checkpoints")
    where = "and its state cannot be read" if lived else "before its first state"
    if phase:
        where = f"in phase {phase} at step {state.get('step') or 0}"
    if not supervisor:
        why = "neither the supervisor nor the trainer lives, and no exit file can be read"
        booted, seen = snapshot.get("booted"), state.get("heartbeat") or created
        if booted and seen and booted > seen:
            why = f"the container was started anew {words.age(now - booted)} ago: its stop ended the run"
        if attempts.limit(run):
            why += ": nothing starts it again"
    found = [Cause("vanished", why), *crash.explain(snapshot, run, {}, "")]
    since = state.get("heartbeat") or created
    return _because("crashed", f"vanished {where}", since, found, evidence=_evidence(run))


def _between_attempts(snapshot: Json, run: Json) -> Verdict:
    """A crash that is tried again is no end: the supervisor waits, and whoever waits for the run goes on."""
    pending, now = attempts.pending(run) or {}, snapshot["now"]
    mend = f"{RESTART} does it now   |   invoke abort ends it   |   invoke logs"
    found = [Cause("restarting", attempts.says(pending), mend)]
    known = crash.explain(snapshot, run, {**pending, "detail": attempts.says(pending)}, "")
    found += [each for each in known if each.kind != "exit"]
    return _because("degraded", attempts.again(run, pending, now), None, found, evidence=_evidence(run))


def _living(snapshot: Json, run: Json, trainer: Json, gpus: int | None) -> Verdict:
    now, state = snapshot["now"], attempts.state(run)
    run = {**run, "state": state}
    phase = state.get("phase") or "starting"
    found = causes.of(snapshot, run, trainer, gpus)
    if phase == "training":
        stall = _stall(run, state, now, found)
        if stall:
            return stall
    pace = progress.of(run)
    if phase == "starting":
        word, summary = "starting", _detail(state, "loading")
    elif phase == "warming-up":
        word, summary = "warming-up", _warm_up(state, now)
    elif pace.steady_steps == 0:
        word, summary = "warming-up", "no steady step yet"
    else:
        word, summary = "healthy", _going(phase, state, pace)
    asides = (*attempts.so_far(run, now), *_asides(run, state))
    if found:  # since when, one look cannot tell
        return _because("degraded", summary, None, found, asides)
    return Verdict(word, summary, _since(run, state), asides)


def _since(run: Json, state: Json) -> float | None:
    """When it began to be what it is: a checkpoint, an evaluation or its end begins no healthy run anew."""
    if state.get("phase") not in ("starting", "warming-up") and state.get("training_since"):
        return float(state["training_since"])
    return state.get("phase_since") or (run.get("record") or {}).get("created")


def _stall(run: Json, state: Json, now: float, found: list[Cause]) -> Verdict | None:
    """No step for max(60 s, min(15 min, 10 x the median step)); a compile moves the limit to its budget.

    Only while it trains: the trainer sets `progress_at` anew when a checkpoint or an evaluation is done.
    """
    moved_at = state.get("progress_at") or state.get("phase_since") or now
    quiet = now - moved_at
    step_s = progress.of(run).step_s or state.get("step_time_s") or 0.0
    limit = max(STALL_FLOOR_S, min(STALL_CEILING_S, STALL_FACTOR * step_s))
    compiling = state.get("compile") or {}
    if compiling.get("active"):
        limit = max(limit, compiling.get("budget_s") or 0.0)
    if quiet <= limit:
        return None
    says = f"no step for {words.age(quiet)}, the limit is {words.age(limit)}"
    if step_s:
        says += f" (a step takes {words.duration(step_s)})"
    hung = [Cause("stalled", says), *(Cause("hung-thread", line) for line in _hung(run, quiet)), *found]
    return _because("stalled", f"at step {state.get('step') or 0}", moved_at, hung, evidence=_evidence(run))


def _hung(run: Json, quiet: float) -> list[str]:
    """The threads that the trainer's own watchdog named in the log, unless that was an earlier hang."""
    block = (run.get("log") or {}).get("traceback") or [""]
    said = _HANG.match(block[0])
    if said is None or float(said[1]) > quiet:
        return []
    named = [line.strip() for line in block[1:] if not line.startswith(("stack of", "    ", "  File"))]
    return named[:2]


def _asides(run: Json, state: Json) -> Iterator[str]:
    """Worth saying, no reason to worry."""
    if not attempts.alive(run, "supervisor"):
        more = " or start it again after a crash" if attempts.limit(run) else ""
        yield f"the supervisor is gone: the run goes on, but nothing will write down how it ends{more}"
    if run.get("tmux", False) is None:
        yield "tmux does not answer: the run goes on without it, invoke attach cannot show it"
    yield from _messages(run)
    for note in state.get("notes") or []:
        yield str(note)


def _messages(run: Json) -> Iterator[str]:
    """What is wrong with the run's own notifier: whoever relies on it must not find out by silence."""
    if not (run.get("record") or {}).get("notify"):
        return
    told = run.get("notify") or {}
    for text in (told.get("failed") or {}).get("texts") or []:
        yield f"{UNSENT}: {text}"
    if not run.get("exit") and not attempts.alive(run, "notifier"):  # it begins before the trainer
        yield "the run's notifier is gone: nobody tells of this run any more"


def _warm_up(state: Json, now: float) -> str:
    compiling, detail = state.get("compile") or {}, state.get("detail")
    count, seconds = int(compiling.get("count") or 0), float(compiling.get("seconds") or 0)
    if not count and not compiling.get("active"):
        return _detail(state, "no step yet")
    text = f"{words.plural(count, 'compile')} in {words.duration(seconds)}"
    moved = compiling.get("moved_at")
    if compiling.get("active") and moved is not None:  # the one that runs is counted, with its time
        text = f"compile {count} for {words.duration(now - moved)} so far"
        text += f", {words.duration(seconds)} in all" if count > 1 else ""
    elif compiling.get("active"):
        text += ", compiling now"
    return f"{detail}: {text}" if detail else text


def _going(phase: str, state: Json, pace: progress.Progress) -> str:
    if phase == "training":
        return f"{words.rate(pace.tokens_per_s or 0)}, step {pace.step} of {pace.steps}"
    detail = _detail(state, "")
    told = detail and not detail.startswith("step ")  # a checkpoint's own is that of the line
    leaving = ", its process is leaving" if phase in ("finished", "stopped") else ""
    return f"{phase}{f' ({detail})' if told else ''} at step {pace.step} of {pace.steps}{leaving}"


def _detail(state: Json, otherwise: str) -> str:
    return str(state.get("detail") or otherwise)


def _evidence(run: Json) -> tuple[str, ...]:
    log = run.get("log") or {}
    return tuple(log.get("traceback") or (log.get("tail") or [])[-8:])


def _operator(operator: Any) -> str:
    if isinstance(operator, dict) and operator.get("user"):
        return f"{operator['user']}@{operator.get('host', '?')}"
    return str(operator or "")
