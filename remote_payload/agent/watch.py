"""A look every two seconds over one `pct exec`: after the first, only what is new travels."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Optional, Tuple

from agent import baseline, gpu, kernel_log, lock, logtimes, metrics, procs, runs, shapes, snapshot
from agent.call import Args, Call, Json
from agent.files import begins_traceback, last_traceback, number, read_json
from agent.frames import ReaderGone

ARGS: Args = {
    "run": (str, None, "run id; without it the newest, also when a newer one is started"),
    "interval_s": (float, 2.0, "seconds between two looks"),
    "log_lines": (int, 60, "lines of the log's end in a whole look"),
    "metrics_lines": (int, 200, "lines of the metrics' end in a whole look"),
    "points": (int, 240, "rows of the curves over the whole run in a whole look"),
    "gpu_deadline_s": (float, 5.0, "seconds that nvidia-smi gets"),
}
LEAST_S = 0.1
GPU_EVERY_S = 6.0  # nvidia-smi takes 0.1 s of a core
DISK_EVERY_S = 15.0
YOUNG_S = 30.0  # between run.json and the first process
MAX_NEW = 64 * 1024  # bytes of a log that grew by more in one look: its end is enough
Stamp = Optional[Tuple[int, int, int]]  # of a file


def run(call: Call) -> Json:
    """`part`s until the run has ended: whole ones (`snapshot curves evaluations`), then `new` ones.

    The last is whole. Result `{run, looks}`. Raises ReaderGone as soon as nobody reads.
    """
    watch = _Watch(call)
    looks = 0
    while True:
        part, ended = watch.look()
        call.frames.part(part)
        looks += 1
        if ended and not watch.restarting():
            return {"run": watch.run_id, "looks": looks}
        _sleep(call, max(LEAST_S, call.args["interval_s"]))


def _sleep(call: Call, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while True:
        if call.frames.gone():
            raise ReaderGone
        left = ends - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.5))


class _Watch:
    """What was sent already, so that the next look sends only the rest."""

    def __init__(self, call: Call) -> None:
        self.call, self.roots = call, call.roots
        self.run_id: str | None = None
        self.metrics = self.log = _Grown("", 0)
        self.saved: Any = None
        self.traceback: list[str] = []
        self.record: Json | None = None
        self.stamps: dict[str | None, Stamp] = {}
        self.gpu: gpu.Query | None = None
        self.gpu_at = self.disk_at = time.monotonic()

    def look(self) -> tuple[Json, bool]:
        """The next part, and whether it is the last."""
        marked = procs.marked()
        known = [self.call.args["run"]] if self.call.args["run"] else runs.known(self.roots, marked)
        newest = known[0] if known else None
        if newest is None or newest != self.run_id or self._ended(newest, marked):
            return self._whole(newest, marked)
        return {"new": self._new(newest, marked)}, False

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
            self.metrics = _Grown(metrics.path(path), _size(metrics.path(path)))
            self.log = _Grown(os.path.join(path, "train.log"), _size(os.path.join(path, "train.log")))
            self.stamps = {}
        whole = snapshot.run(self.call._replace(args={**wishes, "run": run_id}))
        self.run_id = run_id
        part: Json = {"snapshot": whole, "curves": None, "evaluations": []}
        if run_id is None:
            return part, True
        self.saved = (whole["run"]["state"] or {}).get("last_checkpoint")
        self.traceback = (whole["run"]["log"] or {}).get("traceback") or []
        self.record = whole["run"]["record"]
        part["curves"] = metrics.curves(path, args["points"])
        part["evaluations"] = metrics.evaluations(path)
        return part, self._ended(run_id, marked)

    def _new(self, run_id: str, marked: dict[str, list[procs.Proc]]) -> Json:
        path = runs.folder(self.roots, run_id)

        def living(found: dict[str, list[procs.Proc]]) -> Json:
            state = shapes.sound(read_json(os.path.join(path, "state.json")), shapes.STATE)
            return {"state": state, "processes": snapshot.processes(found.get(path, []), state)}

        settled = snapshot.settled(living, marked)
        lines = [shapes.sound(_parsed(line), shapes.METRICS) for line in self.metrics.lines()]
        run_facts: Json = {
            "id": run_id,
            **settled,
            "stop": shapes.sound(read_json(os.path.join(path, "stop.json")), shapes.STOP),
            "attempts": shapes.sound(read_json(os.path.join(path, "attempts.json")), shapes.ATTEMPTS),
            "notify": shapes.sound(read_json(os.path.join(path, "notify.json")), shapes.NOTIFY),
            "metrics": [line for line in lines if line is not None and line.get("step") is not None],
            "log": self._log(),
        }
        saved = (settled["state"] or {}).get("last_checkpoint")
        if saved != self.saved:
            self.saved = saved
            run_facts["checkpoints"] = snapshot.checkpoints(path)
        if self._changed(baseline.path(path, self.record)):
            run_facts["baseline"] = baseline.best(path, self.record)
        facts: Json = {"now": time.time(), "lock": lock.owner(self.roots.run), "run": run_facts}
        now = time.monotonic()
        if now - self.disk_at >= DISK_EVERY_S:
            self.disk_at = now
            facts.update(
                disks=snapshot.disks(self.roots), shm=snapshot.disk("/dev/shm"), xids=kernel_log.xids()
            )
        table = self._gpus(now)
        return facts if table is None else {**facts, "gpus": table}

    def _changed(self, place: str | None) -> bool:
        """Whether the file is another than when this was last asked, or is there for the first time."""
        before, self.stamps[place] = self.stamps.get(place), _stamp(place)
        return before != self.stamps[place]

    def _log(self) -> Json:
        before = self.log.size
        lines = self.log.lines()
        texts = [line.decode("utf-8", "replace") for line in lines]
        shown = [line.rstrip("\r").rpartition("\r")[2][: snapshot.LINE_CHARS] for line in texts]
        facts: Json = {
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


class _Grown:
    """A file that grows: whole lines behind byte `at`; one that became shorter is read from the start."""

    def __init__(self, path: str, at: int) -> None:
        self.path, self.at = path, at
        self.size, self.mtime = at, 0.0

    def lines(self) -> list[bytes]:
        try:
            with open(self.path, "rb") as file:
                facts = os.fstat(file.fileno())
                self.size, self.mtime = facts.st_size, facts.st_mtime
                if self.size < self.at:
                    self.at = 0
                skipped = self.size - self.at > MAX_NEW
                begin = self.size - MAX_NEW if skipped else self.at
                file.seek(begin)
                data = file.read(MAX_NEW)
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self.at = begin + whole
        return data[:whole].split(b"\n")[1 if skipped else 0 : -1]


def _stamp(path: str | None) -> Stamp:
    """What tells one content of a file from another without reading it; None where there is none."""
    if path is None:
        return None
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _size(path: str) -> int:
    """The byte behind the last whole line: a line in progress is sent when it is whole."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            begin = max(0, end - MAX_NEW)
            file.seek(begin)
            return begin + file.read(MAX_NEW).rfind(b"\n") + 1
    except OSError:
        return 0


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
