"""A look every two seconds over one `pct exec`: after the first, only what is new travels."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, Callable, Optional, Tuple

from agent import baseline, gpu, kernel_log, lock, logtimes, metrics, procs, runs, shapes, snapshot, tmux
from agent.call import Args, Call, Json
from agent.files import begins_traceback, last_traceback, number, read_json
from agent.frames import ReaderGone

ARGS: Args = {
    "run": (str, None, "run id; without it the newest, also when a newer one is started"),
    "interval_s": (float, 2.0, "seconds between two looks"),
    "log_lines": (int, 60, "lines of the log's end in a whole look"),
    "metrics_lines": (int, 200, "lines of the metrics' end in a whole look"),
    "points": (int, 240, "rows of the curves over the whole run in a whole look; 0: neither they nor τ"),
    "gpu_deadline_s": (float, 5.0, "seconds that nvidia-smi gets"),
}
LEAST_S = 0.1
END_S, RECENT_S = 0.5, 60.0  # between two looks at a run that has ended, while what is left of it ends, too
GPU_EVERY_S = 6.0  # nvidia-smi takes 0.1 s of a core
SLOW_EVERY_S = 15.0  # disks, checkpoints, who holds a GPU and tmux take 10 ms
YOUNG_S = 30.0  # between run.json and the first process
MAX_NEW = 64 * 1024  # bytes of a log that grew by more in one look: its end is enough
KNOWN = 512  # bytes by which a file is known again: a line of metrics, its time and all
Stamp = Optional[Tuple[int, int, int]]  # of a file


def run(call: Call) -> Json:
    """`part`s until the run has ended: whole ones (`snapshot curves evaluations`), then `new` ones.

    A `new` one has all that a verdict goes by, of what seldom changes only what did. The last is whole.
    Result `{run, looks}`. Raises ReaderGone as soon as nobody reads.
    """
    watch = _Watch(call)
    looks = 0
    while True:
        part, ended = watch.look()
        call.frames.part(part)
        looks += 1
        if ended and not watch.restarting():
            return {"run": watch.run_id, "looks": looks}
        _sleep(call, max(LEAST_S, call.args["interval_s"]), watch.ending)


def _sleep(call: Call, seconds: float, ending: Callable[[], bool]) -> None:
    """Until the next look is due; one that sees the end is due as soon as that is there."""
    began = time.monotonic()
    over = ending()
    while True:
        if call.frames.gone():
            raise ReaderGone
        if not over and ending():
            return
        left = began + (min(seconds, END_S) if over else seconds) - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, END_S))


class _Watch:
    """What was sent already, so that the next look sends only the rest."""

    def __init__(self, call: Call) -> None:
        self.call, self.roots = call, call.roots
        self.run_id: str | None = None
        self.metrics = self.log = _Grown("")
        self.saved: Any = None
        self.traceback: list[str] = []
        self.record: Json | None = None
        self.stamps: dict[str | None, Stamp] = {}
        self.gpu: gpu.Query | None = None
        self.no_gpu = False
        self.tmux: _Tmux | None = None
        self.gpu_at = self.slow_at = time.monotonic()

    def look(self) -> tuple[Json, bool]:
        """The next part, and whether it is the last."""
        marked = procs.marked()
        known = [self.call.args["run"]] if self.call.args["run"] else runs.known(self.roots, marked)
        newest = known[0] if known else None
        if newest is None or newest != self.run_id or self._ended(newest, marked):
            return self._whole(newest, marked)
        lines = self.metrics.lines()
        if self.metrics.anew:  # another attempt has taken steps back
            return self._whole(newest, marked)
        return {"new": self._new(newest, marked, lines)}, False

    def ending(self) -> bool:
        """Whether it was written down a moment ago how the run ended; its last processes may still leave."""
        try:
            at = os.stat(os.path.join(runs.folder(self.roots, self.run_id or ""), "exit.json")).st_mtime
        except OSError:
            return False
        return abs(time.time() - at) < RECENT_S

    def restarting(self) -> bool:
        """Whether a start is under way, whose run would be the one to watch next."""
        owner = lock.owner(self.roots.run) if self.call.args["run"] is None else None
        return owner is not None and owner.get("verb") in ("start", "restart")

    def _ended(self, run_id: str, marked: dict[str, list[procs.Proc]]) -> bool:
        path = runs.folder(self.roots, run_id)
        if path in marked:
            return False
        if os.path.exists(os.path.join(path, "exit.json")):
            return True
        created = number(read_json(os.path.join(path, "run.json")), "created")
        return created is None or abs(time.time() - created) > YOUNG_S

    def _whole(self, run_id: str | None, marked: dict[str, list[procs.Proc]]) -> tuple[Json, bool]:
        args = self.call.args
        wishes = {name: args[name] for name in ("log_lines", "metrics_lines", "gpu_deadline_s")}
        if run_id is not None:
            path = runs.folder(self.roots, run_id)
            # before the look: what is written meanwhile is sent twice rather than never
            self.metrics = _Grown(metrics.path(path))
            self.log = _Grown(os.path.join(path, "train.log"))
            self.stamps, self.tmux = {}, None
            self._changed(os.path.join(path, "run.json"))
        whole = snapshot.run(self.call._replace(args={**wishes, "run": run_id}))
        self.run_id = run_id
        part: Json = {"snapshot": whole, "curves": None, "evaluations": []}
        if run_id is None:
            return part, True
        self.saved = (whole["run"]["state"] or {}).get("last_checkpoint")
        self.traceback = (whole["run"]["log"] or {}).get("traceback") or []
        self.record = whole["run"]["record"]
        self.no_gpu = whole["gpus"]["status"] == "absent"
        if args["points"]:
            part["curves"] = metrics.curves(path, args["points"])
            part["evaluations"] = metrics.evaluations(path)
        return part, self._ended(run_id, marked)

    def _new(self, run_id: str, marked: dict[str, list[procs.Proc]], lines: list[bytes]) -> Json:
        path = runs.folder(self.roots, run_id)

        def read(name: str, shape: Json) -> Any:
            return shapes.sound(read_json(os.path.join(path, name)), shape)

        def living(found: dict[str, list[procs.Proc]]) -> Json:
            state, end = read("state.json", shapes.STATE), read("exit.json", shapes.EXIT)
            return {"state": state, "exit": end, "processes": snapshot.processes(found.get(path, []), state)}

        settled = snapshot.settled(living, marked)
        steps = [shapes.sound(_parsed(line), shapes.METRICS) for line in lines]
        run_facts: Json = {
            "id": run_id,
            **settled,
            "stop": read("stop.json", shapes.STOP),
            "attempts": read("attempts.json", shapes.ATTEMPTS),
            "notify": read("notify.json", shapes.NOTIFY),
            "metrics": [step for step in steps if step is not None and step.get("step") is not None],
            "log": self._log(),
        }
        if self._changed(os.path.join(path, "run.json")):
            run_facts["record"] = self.record = read("run.json", shapes.RECORD)
        if self._changed(baseline.path(path, self.record)):
            run_facts["baseline"] = baseline.best(path, self.record)
        facts: Json = {"now": time.time(), "lock": lock.owner(self.roots.run), "run": run_facts}
        now = time.monotonic()
        table = self._gpus(now)
        if table is not None:
            facts["gpus"], self.no_gpu = table, table["status"] == "absent"
        if self.tmux is not None and not self.tmux.is_alive():
            run_facts["tmux"], self.tmux = self.tmux.answer, None
        saved = (settled["state"] or {}).get("last_checkpoint")
        slow = now - self.slow_at >= SLOW_EVERY_S
        if slow or saved != self.saved:
            self.saved = saved
            run_facts["checkpoints"] = snapshot.checkpoints(path)
        if slow:
            self.slow_at = now
            ours = {proc.pid for found in marked.values() for proc in found}
            facts.update(
                disks=snapshot.disks(self.roots),
                shm=snapshot.disk("/dev/shm"),
                xids=kernel_log.xids(),
                stale=[] if self.no_gpu else gpu.holders(self.roots.run, ours),
            )
            self.tmux = self.tmux or _Tmux(self.roots.run, run_id)
        return facts

    def _changed(self, place: str | None) -> bool:
        """Whether the file is another than when this was last asked; so is one that was not asked about."""
        known, before = place in self.stamps, self.stamps.get(place)
        self.stamps[place] = now = _stamp(place)
        return not known or before != now

    def _log(self) -> Json | None:
        before = self.log.size
        lines = self.log.lines()
        if not self.log.there:
            self.traceback = []
            return None
        texts = [line.decode("utf-8", "replace") for line in lines]
        shown = [line.rstrip("\r").rpartition("\r")[2][: snapshot.LINE_CHARS] for line in texts]
        facts: Json = {
            "path": self.log.path,
            "bytes": self.log.size,
            "mtime": self.log.mtime,
            "growth": logtimes.growth(os.path.dirname(self.log.path), time.time()),
            "tail": [line for line in shown if line],
        }
        # To look through the log takes 1 ms, as much as all the rest of a look, so only where it may show
        # another one: one that is known goes on, or gets out of sight.
        if self.log.size != before and (self.traceback or begins_traceback(b"\n".join(lines))):
            block = last_traceback(self.log.path)
            if block != self.traceback:
                self.traceback = facts["traceback"] = block
        return facts

    def _gpus(self, now: float) -> Json | None:
        """The GPU table when it is there; `nvidia-smi` runs beside the looks, which never wait for it."""
        if self.gpu is None and now - self.gpu_at >= GPU_EVERY_S:
            self.gpu_at = now
            self.gpu = gpu.ask(self.roots.run, self.call.args["gpu_deadline_s"])
        if self.gpu is None or not gpu.settled(self.gpu):
            return None
        query, self.gpu = self.gpu, None
        return gpu.answer(query)


class _Tmux(threading.Thread):
    """Whether the run's session is there; it may take seconds to say, and no look waits for it."""

    def __init__(self, run_root: str, run_id: str) -> None:
        super().__init__(name="pctrun-tmux", daemon=True)
        self.run_root, self.run_id = run_root, run_id
        self.answer: bool | None = None
        self.start()

    def run(self) -> None:
        self.answer = tmux.has_session(self.run_root, self.run_id)


class _Grown:
    """A file that grows: its whole lines behind those that it had at the beginning.

    `there`: it could be read. `anew`: it is not the one any more whose lines are known, since it is shorter,
    gone, or another before `at`; it is read from its start.
    """

    def __init__(self, path: str) -> None:
        self.path, self.at, self.end = path, 0, b""
        self.size, self.mtime, self.there, self.anew = 0, 0.0, False, False
        try:
            with open(path, "rb") as file:
                self.size = file.seek(0, os.SEEK_END)
                begin = max(0, self.size - MAX_NEW)
                file.seek(begin)
                data = file.read(MAX_NEW)
        except OSError:
            return
        self._take(begin, data)  # a line in progress is sent when it is whole

    def lines(self) -> list[bytes]:
        self.there = self.anew = False
        try:
            with open(self.path, "rb") as file:
                facts = os.fstat(file.fileno())
                self.size, self.mtime, self.there = facts.st_size, facts.st_mtime, True
                file.seek(self.at - len(self.end))
                self.anew = self.size < self.at or file.read(len(self.end)) != self.end
                if self.anew:
                    self.at, self.end = 0, b""
                skipped = self.size - self.at > MAX_NEW
                begin = self.size - MAX_NEW if skipped else self.at
                file.seek(begin)
                data = file.read(MAX_NEW)
        except OSError:
            self.anew = self.at > 0
            self.size, self.at, self.end = 0, 0, b""
            return []
        return self._take(begin, data).split(b"\n")[1 if skipped else 0 : -1]

    def _take(self, begin: int, data: bytes) -> bytes:
        whole = data[: data.rfind(b"\n") + 1]
        known = self.end if begin == self.at else b""
        self.at, self.end = begin + len(whole), (known + whole)[-KNOWN:]
        return whole


def _stamp(path: str | None) -> Stamp:
    """What tells one content of a file from another without reading it; None where there is none."""
    if path is None:
        return None
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
