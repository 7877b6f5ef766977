"""The run's own account of itself: state.json for whoever looks now, metrics.jsonl for whoever looks back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from trainer.errors import Refusal

HEARTBEAT_S = 1.0  # the contract allows 2 s between two states
COMPILE_BUDGET_S = 600.0


def _sole_writer(path: Path) -> TextIO:
    """`path`, emptied, because a run's file starts anew; two trainers would mix their steps there."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Refusal(f"{path.parent}: another trainer is writing there; choose another --run-dir") from None
    file.truncate(0)
    return file


class RunRecord:
    """Written by any thread; a heartbeat thread rewrites state.json so that a silent trainer is a dead
    one. A full disk is told in the log and outlived: training goes on, the files catch up when there is
    room.

    Raises Refusal if another trainer writes to `run_dir`, OSError if it cannot be written at the start."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._compile: Callable[[], dict[str, Any]] = lambda: {"count": 0, "seconds": 0.0, "active": False}
        now = time.time()
        self._state: dict[str, Any] = {
            "schema": 1,
            "pid": os.getpid(),
            "phase": "starting",
            "phase_since": now,
            "training_since": None,
            "heartbeat": now,
            "progress_at": now,
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
        self.write()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def watch_compiles(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        """`snapshot()` gives {"count", "seconds", "active"}; it is asked at each heartbeat."""
        self._compile = snapshot

    def compiles(self) -> dict[str, Any]:
        return self._compile()

    def phase(self, phase: str, detail: str = "") -> None:
        now = time.time()
        with self._lock:
            if phase != self._state["phase"]:
                self._state["phase_since"] = now
            if phase == "training" and self._state["training_since"] is None:
                self._state["training_since"] = now
            self._state.update(phase=phase, detail=detail, progress_at=now)
        self.write()

    def progress(self, **fields: Any) -> None:
        """Something moved: a step, a file read, a document evaluated."""
        with self._lock:
            self._state.update(fields, progress_at=time.time())
        self.write()

    def note(self, text: str) -> None:
        """A remark that a person should see in every status."""
        with self._lock:
            self._state["notes"].append(text)
        self.write()

    def metric(self, **fields: Any) -> None:
        with self._lock:
            try:
                self._metrics.write(json.dumps(fields) + "\n")
                self._metrics.flush()  # what did not fit stays in the buffer
            except OSError as error:
                self._tell_of("metrics.jsonl", error)

    def write(self) -> None:
        with self._lock:
            self._state["heartbeat"] = time.time()
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
            self._metrics.close()

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.write()
