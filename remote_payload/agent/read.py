"""A log goes out at the pipe's speed, is followed through truncation, and stops with its reader."""

from __future__ import annotations

import os
import time
from typing import Any

from agent import procs, runs
from agent.call import Args, Call, Refusal
from agent.files import tail_offset
from agent.frames import Frames, ReaderGone

ARGS: Args = {
    "run": (str, None, "run id; without it the newest"),
    "lines": (int, 50, "how many lines of the end"),
    "offset": (int, None, "byte to begin at, instead of lines"),
    "follow": (bool, False, "go on until the run has ended"),
}
CHUNK = 512 * 1024
POLL_S = 0.2
HEARTBEAT_S = 5.0
TAIL_LIMIT = 64 * 1024 * 1024  # bytes looked through for the beginning of `lines`


def run(call: Call) -> dict[str, Any]:
    """Send the log's end, or all from `offset`: `{run, offset, bytes, ended}`, `offset` of the first byte."""
    chosen = runs.named(call.roots, call.args["run"] or None)
    run_dir = runs.folder(call.roots, chosen)
    path = os.path.join(run_dir, "train.log")
    there = os.path.exists(path)
    if not there and not call.args["follow"]:
        raise Refusal("no-run", f"run {chosen} has no log yet", "look again in a moment")
    start = call.args["offset"]
    if start is None:
        start = tail_offset(path, call.args["lines"], TAIL_LIMIT) if there else 0
    log = Log(path, start)
    if call.args["follow"]:
        _follow(call, chosen, run_dir, log)
    log.send(call.frames)
    return {"run": chosen, "offset": start, "bytes": log.sent, "ended": _ended(run_dir)}


class Log:
    """A file read forward from byte `at`; one that was cut or replaced is read again from its beginning."""

    def __init__(self, path: str, at: int) -> None:
        self.path, self.at, self.sent = path, at, 0
        self.inode: int | None = None

    def send(self, frames: Frames) -> bool:
        """Send what is new; whether anything was."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        before = self.sent
        try:
            facts = os.fstat(handle)
            if facts.st_size < self.at or self.inode not in (None, facts.st_ino):
                frames.note("the log was cut or replaced: reading from its new beginning")
                self.at = 0
            self.inode = facts.st_ino
            os.lseek(handle, self.at, os.SEEK_SET)
            while True:
                block = os.read(handle, CHUNK)
                if not block:
                    return self.sent > before
                frames.out(block)
                self.at += len(block)
                self.sent += len(block)
        finally:
            os.close(handle)


def _follow(call: Call, name: str, run_dir: str, log: Log) -> None:
    """Send lines as they come until the run has ended; raises ReaderGone as soon as nobody reads."""
    heard = beat = time.monotonic()
    while not os.path.exists(os.path.join(run_dir, "exit.json")):
        if log.send(call.frames):
            heard = beat = time.monotonic()
        if call.frames.gone():
            raise ReaderGone
        now = time.monotonic()
        if now - beat >= HEARTBEAT_S:
            if _ended(run_dir):
                return
            beat = now
            call.frames.note(f"{name}: no new line for {int(now - heard)} s")
        time.sleep(POLL_S)


def _ended(run_dir: str) -> bool:
    """Nothing will write the log any more: the supervisor said so, or no process of the run is left."""
    return os.path.exists(os.path.join(run_dir, "exit.json")) or not procs.scope(run_dir)
