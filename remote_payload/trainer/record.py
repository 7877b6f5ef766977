"""The run's own account of itself: state.json for whoever looks now, metrics.jsonl for whoever looks back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from trainer.errors import Refusal
from trainer.tensorboard import Events

HEARTBEAT_S = 1.0  # the contract allows 2 s between two states
LATE_BYTES = 16 << 20  # of metrics on a full disk: half a day of steps that take a second
COMPILE_BUDGET_S = 600.0


def _sole_writer(path: Path) -> FileIO:
    """`path`, locked: two trainers would mix their steps there. A buffer would lose what it cannot write."""
    file = FileIO(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Refusal(f"{path.parent}: another trainer is writing there; choose another --run-dir") from None
    return file


def _up_to(path: Path, step: int) -> tuple[int, list[dict[str, Any]]]:
    """The byte behind the lines of the first `step` steps, and these lines."""
    at, end, kept = 0, 0, []
    with path.open("rb") as file:
        for raw in file:
            at += len(raw)
            try:
                line = json.loads(raw)
                if line["step"] > step:
                    break
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # a full disk cut it short
            kept.append(line)
            end = at
    return end, kept


class RunRecord:
    """Written by any thread; a heartbeat thread rewrites state.json so that a silent trainer is a dead
    one. A full disk is told in the log and outlived: training goes on, the files catch up when there is
    room.

    The metrics are kept until `begin`. Raises Refusal if another trainer writes to `run_dir`, OSError if it
    cannot be written at the start."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        self.run_dir = run_dir
        self._events: Events | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._compile: Callable[[], dict[str, Any]] = lambda: {"count": 0, "seconds": 0.0, "active": False}
        # Kept by a clock that nobody sets and written by the container's: setting that makes no run old.
        self._moments = dict.fromkeys(("phase_since", "progress_at"), time.monotonic())
        self._state: dict[str, Any] = {
            "schema": 1,
            "pid": os.getpid(),
            "phase": "starting",
            "phase_since": None,
            "training_since": None,
            "heartbeat": None,
            "progress_at": None,
            "step": 0,
            "steps": steps,
            "detail": "",
            "compile": {},
            "step_time_s": None,
            "tokens_per_s": None,
            "loss": None,
            "tau": None,
            "last_checkpoint": None,
            "topology": None,
            "pipeline": None,
            "kernels": {},
            "notes": [],
        }
        self._unwritten = ""
        self._metrics = _sole_writer(run_dir / "metrics.jsonl")
        self._late = bytearray()  # lines, or the rest of one, that wait for room
        self.write()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def begin(
        self, step: int, resume: Path | None, last: dict[str, Any] | None = None, *, tensorboard: bool
    ) -> list[tuple[int, float]]:
        """Training begins after `step`. Another attempt, which resumes from this run's own checkpoints, keeps
        what was measured up to there; beyond it everything comes again. (step, τ) of what stays.

        `last`: that step's metrics as its checkpoint has them, since one that was killed while it saved or
        evaluated has not written them."""
        folders = {(each / "checkpoints").resolve() for each in (self.run_dir, self.run_dir.parent)}
        again = resume is not None and resume.resolve().parent in folders
        end, kept = _up_to(self.run_dir / "metrics.jsonl", step if again else 0)
        self._metrics.truncate(end)
        if tensorboard:
            self._events = Events(self.run_dir, step, lambda text: print(text, flush=True))
        if again and last and not (kept and kept[-1]["step"] == step):
            self.metric(**last)
        told = [(line["step"], line["tau"]) for line in kept if line.get("tau") is not None]
        if told:
            self.progress(tau=told[-1][1])
        return told

    def watch_compiles(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        """`snapshot()` gives {"count", "seconds", "active"}; it is asked at each heartbeat."""
        self._compile = snapshot

    def compiles(self) -> dict[str, Any]:
        return self._compile()

    def phase(self, phase: str, detail: str = "") -> None:
        now = time.monotonic()
        with self._lock:
            if phase != self._state["phase"]:
                self._moments["phase_since"] = now
            if phase == "training":
                self._moments.setdefault("training_since", now)
            self._state.update(phase=phase, detail=detail)
            self._moments["progress_at"] = now
        self.write()

    def progress(self, **fields: Any) -> None:
        """Something moved: a step, a file read, a document evaluated."""
        with self._lock:
            self._state.update(fields)
            self._moments["progress_at"] = time.monotonic()
        self.write()

    def note(self, text: str) -> None:
        """A remark that a person should see in every status."""
        with self._lock:
            self._state["notes"].append(text)
        self.write()

    def metric(self, **fields: Any) -> None:
        with self._lock:
            if len(self._late) < LATE_BYTES:
                self._late += json.dumps(fields).encode() + b"\n"
            try:
                self._catch_up()
            except OSError as error:
                self._tell_of("metrics.jsonl", error)
            if self._events is not None:
                self._events.add(fields)

    def _catch_up(self) -> None:
        while self._late:
            del self._late[: self._metrics.write(self._late)]

    def write(self) -> None:
        with self._lock:
            now, ticks = time.time(), time.monotonic()
            self._state["heartbeat"] = now
            for name, at in self._moments.items():
                self._state[name] = round(now - (ticks - at), 3)
            self._state["compile"] = {**self._compile(), "budget_s": COMPILE_BUDGET_S}
            aside = self.run_dir / ".state.json"
            try:
                aside.write_text(json.dumps(self._state), encoding="utf-8")
                aside.replace(self.run_dir / "state.json")
                self._unwritten = ""
            except OSError as error:
                self._tell_of("state.json", error)

    def _tell_of(self, name: str, error: OSError) -> None:
        if self._unwritten != str(error):
            self._unwritten = str(error)
            print(f"{name} cannot be written ({error.strerror}): free room in {self.run_dir}", flush=True)

    def close(self) -> None:
        self._closed.set()
        self._heart.join()
        self.write()
        with contextlib.suppress(OSError):  # told before
            self._catch_up()
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.write()
