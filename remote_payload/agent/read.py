"""A log goes out at the pipe's speed, is followed through truncation, and stops with its reader."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from agent import loglimit, logtimes, procs, runs
from agent.call import Args, Call, Refusal
from agent.files import size_words, tail_offset
from agent.frames import Frames, ReaderGone

ARGS: Args = {
    "run": (str, None, "run id; without it the newest"),
    "lines": (int, 50, "how many lines of the end"),
    "offset": (int, None, "byte to begin at, instead of lines"),
    "since_s": (float, None, "begin at the line that was written so many seconds ago"),
    "since_at": (float, None, "the same for a time of the container's clock, in epoch seconds"),
    "grep": (str, None, "only lines in which this regular expression is found"),
    "follow": (bool, False, "go on until the run has ended"),
}
CHUNK = 512 * 1024
POLL_S = 0.2
HEARTBEAT_S = 5.0
TAIL_LIMIT = 64 * 1024 * 1024  # bytes looked through for the beginning of `lines`


def run(call: Call) -> dict[str, Any]:
    """Send the log's end, or all from a byte or a time: `{run, offset, bytes, at, ended}`.

    From byte `offset` to byte `at` was looked at, `bytes` were sent. A `part` `{run, at}` comes first, so
    that a reader who is cut off knows where to go on. With `grep` a `part` `{at}` follows each batch: all
    lines before that byte have been judged, and the matching ones sent.
    """
    chosen = runs.named(call.roots, call.args["run"] or None)
    run_dir = runs.folder(call.roots, chosen)
    path = os.path.join(run_dir, "train.log")
    there = os.path.exists(path)
    if not there and not call.args["follow"]:
        raise Refusal("no-run", f"run {chosen} has no log yet", "look again in a moment")
    start = _start(call, run_dir, path) if there else call.args["offset"] or 0
    kept = loglimit.first_byte(path, start)
    if kept > start:
        call.frames.note(f"the log's first {size_words(kept)} were dropped, for it had become too long")
        start = kept
    sieve = Sieve(call.frames, call.args["grep"]) if call.args["grep"] is not None else None
    call.frames.part({"run": chosen, "at": start})
    log = Log(path, start, sieve)
    if call.args["follow"]:
        _follow(call, chosen, run_dir, log)
    ended = _ended(run_dir)  # before the last look: what is written after it belongs to the next call
    log.send(call.frames)
    if sieve is None:
        return {"run": chosen, "offset": start, "bytes": log.sent, "at": log.at, "ended": ended}
    if ended:
        sieve.finish()
    at = log.at - sieve.pending
    return {"run": chosen, "offset": start, "bytes": sieve.sent, "at": at, "ended": ended}


def _start(call: Call, run_dir: str, path: str) -> int:
    """The first byte to send."""
    args = call.args
    if args["offset"] is not None:
        return int(args["offset"])
    since = args["since_at"] if args["since_s"] is None else time.time() - args["since_s"]
    if since is None:
        return tail_offset(path, args["lines"], TAIL_LIMIT)
    found = logtimes.offset(run_dir, since)
    if found is None:
        call.frames.note("when its lines were written was not noted for this run: all of it is shown")
    return found or 0


class Sieve:
    """Lets through the lines in which the pattern is found; a line in progress waits for its end."""

    def __init__(self, frames: Frames, pattern: str) -> None:
        try:
            self._found = re.compile(pattern.encode()).search
        except (re.error, OverflowError) as error:
            raise Refusal(
                "usage", f"--grep {pattern!r}: {error}", "quote what is meant as it stands: \\["
            ) from None
        self._frames, self._rest = frames, b""
        self.sent = 0

    def take(self, block: bytes) -> None:
        *lines, self._rest = (self._rest + block).split(b"\n")
        self._send([line + b"\n" for line in lines])

    def judged(self, at: int) -> None:
        """Say how far: byte `at` is where the block ended that was taken last."""
        self._frames.part({"at": at - self.pending})

    @property
    def pending(self) -> int:
        """Bytes of the line in progress."""
        return len(self._rest)

    def finish(self) -> None:
        """Judge the last line, which nothing will end."""
        rest, self._rest = self._rest, b""
        self._send([rest] if rest else [])

    def _send(self, lines: list[bytes]) -> None:
        matching = b"".join(line for line in lines if self._found(line))
        if matching:
            self._frames.out(matching)
            self.sent += len(matching)


class Log:
    """A file read forward from byte `at`; one that was cut or replaced is read again from its beginning."""

    def __init__(self, path: str, at: int, sieve: Sieve | None = None) -> None:
        self.path, self.at, self.sent, self.sieve = path, at, 0, sieve
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
                if self.sieve is not None:
                    self.sieve.finish()
                frames.part({"at": 0})
            self.inode = facts.st_ino
            os.lseek(handle, self.at, os.SEEK_SET)
            while True:
                block = os.read(handle, CHUNK)
                if not block:
                    return self.sent > before
                if self.sieve is None:
                    frames.out(block)
                else:
                    self.sieve.take(block)
                    self.sieve.judged(self.at + len(block))
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
