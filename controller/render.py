"""The status screen: is it fine, why, how far, how fast, what is saved, what to do: 25 lines of 100."""

from __future__ import annotations

import datetime
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from controller import causes, gpu_words, progress, words
from controller.verdict import Verdict

Json = dict[str, Any]

WIDTH, HEIGHT = 100, 25
_ROOMY, _INDENT = 90, 11  # columns: from here on the log is indented, too; where the words begin
_GREEN, _YELLOW, _RED, _PURPLE = 32, 33, 31, 35
_COLOURS = {
    **dict.fromkeys(("healthy", "finished", "ready"), _GREEN),
    **dict.fromkeys(("degraded", "stalled"), _YELLOW),
    **dict.fromkeys(("crashed", "not ready"), _RED),
    "unreachable": _PURPLE,
}
_LIVE = frozenset({"starting", "warming-up", "healthy", "degraded", "stalled"})
_REASONS, _GPU_ROWS, _STALE, _EVIDENCE, _TAIL = 5, 8, 2, 8, 5
_BETWEEN = re.compile(r"   \|   |(?<=;) (?=then )")  # what is to be done first, and what after it
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[@-_])")


def screen(
    label: str,
    verdict: Verdict,
    snapshot: Json | None,
    *,
    more: Sequence[str] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
    tail: int = _TAIL,
) -> str:
    """The whole screen as plain text; the log's `tail` gives way when it gets too high.

    `more`: lines to show between the run and the machine.
    """
    lines = [_headline(label, verdict, snapshot)]
    reasons = [line for reason in verdict.reasons for line in _wrapped(reason, width)]
    lines += _rows("why", _some(reasons, _REASONS))
    if snapshot is not None:
        run = snapshot.get("run")
        if run:
            lines += _run_lines(snapshot, run, verdict, width)
            lines += more
        lines += _machine_lines(snapshot)
    bar = f"{'':<{_INDENT if width >= _ROOMY else 2}}| "
    quoted = [bar + _clean(line) for line in _quoted(verdict, snapshot, tail)]
    ending = list(_rows("next", _next_lines(next_step(verdict, snapshot), width)))
    room = max(0, height - len(lines) - len(ending))
    lines = [*lines, *quoted[len(quoted) - min(room, len(quoted)) :]][: height - len(ending)]
    return "\n".join(words.cut(line, width) for line in [*lines, *ending])


def one_line(label: str, verdict: Verdict, snapshot: Json | None) -> str:
    """The same in one line, for `wait`: with how long it will take, where that is known."""
    eta = _eta((snapshot or {}).get("run") or {}, verdict)
    return f"{_headline(label, verdict, snapshot)}{f', {eta}' if eta else ''}"


def among_others(label: str, verdict: Verdict, snapshot: Json | None) -> str:
    """The one line that a box gets among several: with the gravest reason, where there is one to act on."""
    line = _headline(label, verdict, snapshot)
    told = verdict.reasons and verdict.word not in ("healthy", "finished", "starting", "warming-up")
    return f"{line}: {_clean(verdict.reasons[0])}" if told else line


def paint(text: str, word: str, stream: TextIO | None = None) -> str:
    """Colour the verdict word of the first line, when a person looks and has not said NO_COLOR."""
    stream = stream or sys.stdout
    colour = _COLOURS.get(word)
    if (
        colour is None
        or not stream.isatty()
        or os.environ.get("NO_COLOR")
        or os.environ.get("TERM") == "dumb"
    ):
        return text
    shown = word.upper()
    return text.replace(shown, f"\x1b[1;{colour}m{shown}\x1b[0m", 1)


def _headline(label: str, verdict: Verdict, snapshot: Json | None) -> str:
    span = ""
    if snapshot is not None and verdict.since is not None:
        age = words.age(snapshot["now"] - verdict.since)
        over = verdict.word in ("finished", "stopped", "crashed")
        span = f" {age} ago" if over else f" for {age}"
    return f"{label}  {verdict.word.upper()}{span}  {verdict.summary}"


def _run_lines(snapshot: Json, run: Json, verdict: Verdict, width: int) -> Iterator[str]:
    now, pace = snapshot["now"], progress.of(run)
    yield from _rows("run", flowing(_launch(run), "  ", width - _INDENT))
    if pace.steps:
        bar = f"{pace.step}/{pace.steps}  {100 * (pace.share or 0):.0f} %"
        yield from _rows("step", [bar])
    live = verdict.word in _LIVE
    if pace.tokens_per_s is not None:
        parts = [words.rate(pace.tokens_per_s), f"{words.duration(pace.step_s or 0)} a step"]
        parts += filter(None, (_eta(run, verdict),))
        share = causes.against_baseline(run)
        if share is not None:
            parts.append(f"{100 * share:.0f} % of the baseline, {run['baseline']['run']}'s")
        yield from _rows("rate", flowing(parts, "   ", width - _INDENT))
    elif live:
        yield from _rows("rate", ["ETA after warm-up"])
    flow = (run.get("state") or {}).get("pipeline")
    if flow and live:
        yield from _rows("split", flowing(_split(flow), "   ", width - _INDENT))
    quality = []
    if pace.loss is not None:
        quality.append(f"loss {pace.loss:.3f}")
    if pace.tau is not None:
        quality.append(f"τ {pace.tau:.2f}")
    if quality:
        yield from _rows("quality", ["   ".join(quality)])
    yield from _rows("saved", [_saved(run, now)])


def _eta(run: Json, verdict: Verdict) -> str:
    eta_s = progress.of(run).eta_s
    return f"ETA {words.duration(eta_s)}" if verdict.word in _LIVE and eta_s is not None else ""


def _split(flow: Json) -> list[str]:
    """targets:drafters, which side waits for the other, what a row costs each, and what would be faster."""
    wait, row = flow.get("wait") or {}, flow.get("row_s") or {}
    shares = {side: f"{100 * (wait.get(side) or 0):.0f} %" for side in ("targets", "drafters")}
    hungry = flow.get("starving")
    if hungry in shares:
        fed = "targets" if hungry == "drafters" else "drafters"
        parts = [f"{flow.get('split')}  {hungry} starve: wait {shares[hungry]}, {fed} {shares[fed]}"]
    else:
        parts = [f"{flow.get('split')}  targets wait {shares['targets']}, drafters {shares['drafters']}"]
    if row:
        parts.append(f"a row {words.duration(row['target'])} : {words.duration(row['drafter'])}")
    if flow.get("advice"):
        parts.append(f"{flow['advice']}: {100 * flow['gain']:.0f} % faster")
    return parts


def _launch(run: Json) -> list[str]:
    record = run.get("record") or {}
    parts = [str(run.get("id", "?"))]
    source = record.get("resume_from")
    if source:
        parts.append(f"from {source.get('run')} step {source.get('step')}")
    if record.get("recipe"):
        parts.append(f"recipe {record['recipe']}")
    if record.get("release"):
        parts.append(f"release {str(record['release'])[:8]}")
    if record.get("created"):
        clock = datetime.datetime.fromtimestamp(record["created"], datetime.UTC).strftime("%b %d %H:%M UTC")
        parts.append(f"since {clock}")
    return parts


def _saved(run: Json, now: float) -> str:
    checkpoints = run.get("checkpoints") or []
    source = (run.get("record") or {}).get("resume_from")
    if not checkpoints:
        return (
            f"nothing since step {source.get('step')} of {source.get('run')}"
            if source
            else "no checkpoint yet"
        )
    last = max(checkpoints, key=lambda entry: entry["step"])
    age = f", {words.age(now - last['at'])} ago" if last.get("at") else ""
    return f"checkpoint at step {last['step']} ({words.size(last.get('bytes') or 0)}{age})"


def _machine_lines(snapshot: Json) -> Iterator[str]:
    yield from _gpu_lines(snapshot.get("gpus") or {})
    stale = snapshot.get("stale") or []
    shown = [
        f"pid {entry['pid']} holds a GPU, not of a run: {_clean(entry['command'])[:50]}" for entry in stale
    ]
    yield from _rows("stale", _some(shown, _STALE))
    disks = [_disk(disk) for disk in (*(snapshot.get("disks") or []), snapshot.get("shm")) if disk]
    yield from _rows("free", ["   ".join(disks[at : at + 2]) for at in range(0, len(disks), 2)])
    lock = snapshot.get("lock")
    if lock:
        who = lock.get("operator") or {}
        name = f"{who.get('user', '?')}@{who.get('host', '?')}" if isinstance(who, dict) else str(who)
        since = f" for {words.age(snapshot['now'] - lock['since'])}" if lock.get("since") else ""
        yield from _rows("lock", [f"{name} is at work{since}: {lock.get('verb', '?')}"])
    yield from _log_line(snapshot)


def _gpu_lines(gpus: Json) -> Iterator[str]:
    status, rows = gpus.get("status"), gpus.get("rows") or []
    if status == "absent":
        yield from _rows("gpu", ["no NVIDIA GPU in this container"])
    elif status in ("timeout", "error"):
        yield from _rows("gpu", [f"not known: {gpus.get('detail') or status}"])
    elif rows:
        yield from _rows("gpu", [" #   memory GiB   util   temp   power        name"])
        for text in _some([_gpu_row(row) for row in rows], _GPU_ROWS):
            yield " " * 11 + text


def _gpu_row(row: Json) -> str:
    def cell(key: str, form: str, scale: float = 1.0) -> str:
        value = row.get(key)
        return "–" if value is None else form.format(value / scale)

    memory = f"{cell('memory_used_mib', '{:.1f}', 1024)}/{cell('memory_total_mib', '{:.0f}', 1024)}"
    power = f"{cell('power_w', '{:.0f}')}/{cell('power_limit_w', '{:.0f}')} W"
    util, temperature = cell("utilization_pct", "{:.0f} %"), cell("temperature_c", "{:.0f} C")
    left = f"{row.get('index', '?'):>2}   {memory:>10}   {util:>5}   {temperature:>4}"
    name = str(row.get("name") or "").removeprefix("NVIDIA ")
    return f"{left}   {power:<10}   {_ailment(row) or name}"


def _ailment(row: Json) -> str:
    """What is wrong with a GPU, in the place of its name."""
    if row.get("fault"):
        return str(row["fault"])
    if row.get("ecc_uncorrectable"):
        return "memory errors"
    return "slowed down" if gpu_words.slowed([row]) else ""


def _disk(disk: Json) -> str:
    return f"{disk['path']} {words.size(disk['free_bytes'])} of {words.size(disk['total_bytes'])}"


def _log_line(snapshot: Json) -> Iterator[str]:
    log = (snapshot.get("run") or {}).get("log")
    if not log:
        return
    if not log.get("bytes"):
        yield from _rows("log", ["empty"])
        return
    age = f", last line {words.age(snapshot['now'] - log['mtime'])} ago" if log.get("mtime") else ""
    yield from _rows("log", [f"{words.size(log.get('bytes') or 0)}{age}"])


def _quoted(verdict: Verdict, snapshot: Json | None, tail: int) -> list[str]:
    if verdict.evidence:
        return list(verdict.evidence[-_EVIDENCE:])
    log = ((snapshot or {}).get("run") or {}).get("log") or {}
    return [str(line) for line in (log.get("tail") or [])[-tail:]]


def next_step(verdict: Verdict, snapshot: Json | None) -> str:
    """What to do: the verdict's own mend, else what its word suggests."""
    run = (snapshot or {}).get("run") or {}
    run_id = (run.get("record") or {}).get("id")
    begins = "resumes at the last checkpoint" if causes.has_saved(run) else "this run has no checkpoint"
    if causes.has_saved(run) and run_id is None:
        begins = "not from this run: its run.json cannot be read"
    restart = f"{verdict.again} ({begins})"
    fetch = f"invoke fetch {run_id or 'newest'}"
    logs = "invoke logs" if causes.is_newest(snapshot or {}, run) else f"invoke logs --run {run['id']}"
    return (
        verdict.mend
        or {
            "starting": "invoke wait --until healthy",
            "warming-up": "invoke wait --until healthy",
            "healthy": "invoke logs --follow   |   invoke wait --until finished   |   invoke abort",
            "degraded": f"{logs}   |   {verdict.again}",
            "stalled": f"{logs}   |   invoke attach   |   {verdict.again}",
            "crashed": f"{logs}   |   {restart}",
            "finished": f"{fetch}   |   {logs}   |   invoke restart --from-scratch",
            "stopped": restart,
            "not-running": "invoke deploy   |   invoke restart",
            "unreachable": "check the host and the way to it; the run may be fine",
        }[verdict.word]
    )


def _some(texts: list[str], limit: int) -> list[str]:
    """At most `limit` lines, the last of which then says how many are not shown."""
    if len(texts) <= limit:
        return texts
    return [*texts[: limit - 1], f"and {len(texts) - limit + 1} more: --json shows them"]


def _rows(name: str, texts: Any) -> Iterator[str]:
    for index, text in enumerate(texts):
        yield f"  {name if index == 0 else '':<9}{text}"


def _wrapped(reason: str, width: int) -> list[str]:
    """Whole, because the cause often stands at its end; two lines at most, four in a narrow terminal."""
    most = 2 if width >= _ROOMY else 4
    return textwrap.wrap(_clean(reason), width - _INDENT, max_lines=most, placeholder=" …")


def _next_lines(text: str, width: int) -> list[str]:
    """Between two commands rather than within one: they are there to be copied."""
    if len(text) <= width - _INDENT:
        return [text]
    return [line for each in _BETWEEN.split(text) for line in _wrapped(each, width)]


def flowing(parts: list[str], between: str, width: int) -> list[str]:
    """The parts on as many lines of `width` columns as they need, none of them torn."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}{between}{part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _clean(line: str) -> str:
    """A log line without colours, without what a progress bar has overwritten, without control characters."""
    shown = _ESCAPES.sub("", line).expandtabs(4).rstrip("\r").rpartition("\r")[2]
    return "".join(letter if letter.isprintable() else "?" for letter in shown)
