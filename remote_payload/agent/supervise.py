"""Someone must outlive the connection, see how the trainer ends, and write it where `status` looks.

Run as `python -m agent.supervise RUN_DIR [OFFER]` inside a tmux session. The pane is only a window: losing
it, or the tmux server, costs nothing. The trainer writes its log itself: losing the supervisor costs only
`exit.json`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO

from agent import (
    attempts,
    baseline,
    loglimit,
    logtimes,
    notifying,
    oom,
    procs,
    runs,
    secrets,
)
from agent.files import last_traceback, read_json, tail_lines, tail_offset

POLL_S = 0.2
CHUNK = 64 * 1024
PANE_LINES = 200
SHOW_S, SHOWN = 0.1, 1 << 20
EXCEPTION_LINES = 12  # of the log's end: an exception above them was not the end


def main(run_dir: str, offer: str = "") -> int:
    private = secrets.take(offer) if offer else {}  # at once: it is there as long as the agent is
    record = secrets.join(read_json(os.path.join(run_dir, "run.json")), private)
    if record is None:
        print(f"{run_dir}/run.json cannot be read: nothing to supervise", file=sys.stderr)
        return 2
    # Not SIG_IGN: ignored signals stay ignored across exec, and the trainer needs its SIGTERM.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP):
        signal.signal(number, lambda *_: None)
    log = os.path.join(run_dir, "train.log")
    try:  # O_EXCL: a run is started once, also when tmux was slow and its session came up after all
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        print(f"{run_dir} was started before: a run is one launch", file=sys.stderr)
        return 2
    with open(handle, "wb") as output:
        if secrets.lost(record):
            words = f"these secrets did not reach the run: {', '.join(secrets.lost(record))}"
            _tell(output, words)
            runs.write_exit(run_dir, {"code": 1, "signal": None, "reason": "crashed", "detail": words})
            return 1
        watcher = notifying.begin(run_dir, record, private)
        try:
            return _attend(run_dir, record, output)
        finally:
            notifying.finish(run_dir, watcher, private)


def _attend(run_dir: str, record: dict[str, Any], output: BinaryIO) -> int:
    """See the trainer through, again after a crash where the record wishes it; write how the run ended."""
    log = os.path.join(run_dir, "train.log")
    pane, clock, limit = Pane(log), logtimes.Writer(run_dir), loglimit.Limiter(log)
    speed = baseline.Keeper(run_dir, record)

    def look() -> None:
        pane.show()
        if clock.due():
            clock.note()
            limit.enforce()
        time.sleep(POLL_S)

    tries, argv = attempts.Attempts(run_dir, record), list(record["argv"])
    while True:
        memory = oom.Watch()
        try:
            trainer = _launch(record, argv, output)
        except OSError as error:
            words = f"cannot start {argv[0]}: {error.strerror}"
            _tell(output, words)
            runs.write_exit(run_dir, {"code": 127, "signal": None, "reason": "crashed", "detail": words})
            return 1
        while trainer.poll() is None:
            look()
            memory.note()
            if speed.due():
                speed.note()
        pane.show()
        speed.note()
        end = judge_exit(run_dir, trainer.returncode, memory.killed())
        pause = tries.after(end, trainer.pid)
        if pause is None:
            break
        attempts.end_leftovers(run_dir)
        if not tries.wait(pause, look):
            words = f"stopped by an operator before it was tried again; it had crashed: {end['detail']}"
            end.update(reason="stopped", detail=words)
            break
        more, line = tries.begin()
        argv = [*record["argv"], *more]
        _tell(output, line)
    runs.write_exit(run_dir, end)
    return 0


def _launch(record: dict[str, Any], argv: list[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        cwd=record["release_dir"],
        env=record["env"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _tell(output: BinaryIO, line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        output.write(f"{line}\n".encode())
        output.flush()


class Pane:
    """Copies the log to the terminal as it grows; a terminal that fails once is not used again.

    It never waits: with a tmux that is stopped, or slower than the log, the end of the trainer would be seen
    late or never. What does not fit within SHOW_S is left out once it is more than SHOWN bytes.
    """

    def __init__(self, log: str) -> None:
        self.log = log
        self.at = tail_offset(log, PANE_LINES, CHUNK)
        self.alive = True
        with contextlib.suppress(OSError):
            os.set_blocking(1, False)

    def show(self) -> None:
        ends = time.monotonic() + SHOW_S
        while self.alive and time.monotonic() < ends:
            try:
                with open(self.log, "rb", buffering=0) as file:
                    size = file.seek(0, os.SEEK_END)
                    if not 0 <= size - self.at <= SHOWN:
                        self.at = tail_offset(self.log, PANE_LINES, CHUNK)
                    file.seek(self.at)
                    block = file.read(CHUNK)
                if not block:
                    return
                self.at += os.write(1, block)
            except BlockingIOError:
                select.select([], [1], [], SHOW_S / 5)
            except OSError:  # EIO: the tmux server is gone
                self.alive = False


def judge_exit(run_dir: str, returncode: int, no_memory: bool = False) -> dict[str, Any]:
    """How the trainer ended, in `exit.json`'s words: from its status, its last phase, an operator's wish.

    `no_memory`: the kernel has just killed for want of memory."""
    phase = (read_json(os.path.join(run_dir, "state.json")) or {}).get("phase")
    wished = os.path.exists(os.path.join(run_dir, "stop.json"))
    if returncode < 0:
        name = procs.signal_name(-returncode)
        asked = wished and name in ("SIGTERM", "SIGKILL")
        detail = f"killed by {name}" + (" when an operator stopped it" if asked else "")
        if name == "SIGKILL" and not asked and no_memory:
            detail = "killed by the kernel: out of memory"
        reason = "stopped" if asked else "crashed"
        return {"code": 128 - returncode, "signal": name, "reason": reason, "detail": detail}
    facts: dict[str, Any] = {"code": returncode, "signal": None}
    if returncode == 0 and phase in ("finished", "stopped"):
        return {**facts, "reason": phase, "detail": ""}
    if returncode == 0:
        return {**facts, "reason": "crashed", "detail": f"ended with status 0 in phase {phase or 'none'}"}
    return {**facts, "reason": "crashed", "detail": _last_word(os.path.join(run_dir, "train.log"))[:300]}


def _last_word(log: str) -> str:
    """The exception at the end, also where its message has more lines, as CUDA has; else the last line."""
    lines, block = tail_lines(log, EXCEPTION_LINES), last_traceback(log)
    raised = block and block[0].startswith("Traceback") and block[-1] in lines
    return block[-1] if raised else (lines or ["no output"])[-1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
