"""TensorBoard's files, for whoever watches many runs with it; metrics.jsonl stays the truth.

Records and events are the tensorboard package's. Its own writer is not used: on a full disk its thread dies
with a traceback in the log, and what it held is lost.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.errors import Refusal, last_line

FOLDER = "tensorboard"
MOST_WAITING = 8 << 20  # bytes kept while the disk is full: some ten thousand steps


def require() -> None:
    """Refuse where the package is missing or does not load."""
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: F401
        from tensorboard.summary.writer import record_writer  # noqa: F401
    except ImportError as error:
        raise Refusal(
            f"log.tensorboard: the package tensorboard does not load here ({last_line(error)}): "
            "build the environment with it (invoke env.build), or set log.tensorboard=false"
        ) from None


class Events:
    """One events file. A reader hides what an earlier attempt wrote of the steps after `start_step`."""

    def __init__(self, run_dir: Path, start_step: int, tell: Callable[[str], None]) -> None:
        self.folder, self._tell = run_dir / FOLDER, tell
        self._handle: int | None = None
        self._whole = 0  # bytes in the file up to its last whole record
        self._waiting = b""
        self._complained = ""
        from tensorboard.compat.proto import event_pb2

        began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._put(event_pb2.Event(file_version="brain.Event:2", wall_time=time.time(), step=start_step + 1))
        self._put(event_pb2.Event(session_log=began, wall_time=time.time(), step=start_step + 1))

    def add(self, metric: dict[str, Any]) -> None:
        """One line of metrics.jsonl; nothing that goes wrong here reaches the training."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        try:
            values = [
                summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(metric)
            ]
            summary = summary_pb2.Summary(value=values)
            self._put(event_pb2.Event(summary=summary, wall_time=metric["time"], step=int(metric["step"])))
        except Exception as error:
            self._complain(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _put(self, event: Any) -> None:
        """Append one record, after those that did not fit before."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        RecordWriter(buffer).write(event.SerializeToString())
        if len(self._waiting) < MOST_WAITING:
            self._waiting += buffer.getvalue()
        try:
            self._write()
        except OSError as error:
            self._complain(error.strerror or str(error))
        else:
            self._complained = ""

    def _write(self) -> None:
        if self._handle is None:
            self.folder.mkdir(exist_ok=True)
            # Readers go through a folder by name: the time comes first, to the nanosecond.
            name = "events.out.tfevents.{:010d}.{:09d}".format(*divmod(time.time_ns(), 10**9))
            self._handle = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        done = 0
        while done < len(self._waiting):  # from the last whole record: over what a full disk took of one
            done += os.pwrite(self._handle, self._waiting[done:], self._whole + done)
        self._whole, self._waiting = self._whole + done, b""

    def _complain(self, why: str) -> None:
        if why != self._complained:
            self._complained = why
            self._tell(f"TensorBoard's file cannot be written ({why}): training goes on without it")


def scalars(metric: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Tag and value of each curve; a step that compiled is in no rate."""
    for name in ("loss", "lr", "grad_norm"):
        if metric.get(name) is not None:
            yield f"train/{name}", metric[name]
    if metric.get("step_s") and not metric.get("compile"):
        yield "speed/tokens_per_s", metric["tokens"] / metric["step_s"]
        yield "speed/step_s", metric["step_s"]
    if metric.get("tau") is not None:
        yield "eval/tau", metric["tau"]
    for slot, share in enumerate(metric.get("accuracy") or [], 1):
        yield f"accuracy/slot_{slot:02d}", share
    for thread, share in (metric.get("busy") or {}).items():
        yield f"busy/{thread}".replace(" ", "_"), share
