"""Someone must outlive the connection, see how the trainer ends, and write it where `status` looks.

Run as `python -m agent.supervise RUN_DIR` inside a tmux session. The pane is only a window: losing it, or the
tmux server, costs nothing. The trainer writes its log itself: losing the supervisor costs only `exit.json`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from agent import baseline, loglimit, logtimes, procs, runs
from agent.files import read_json, tail_lines, tail_offset

POLL_S = 0.2
CHUNK = 64 * 1024
PANE_LINES = 200


def main(run_dir: str) -> int:
    record = read_json(os.path.join(run_dir, "run.json"))
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
        try:
            trainer = subprocess.Popen(
                record["argv"],
                cwd=record["release_dir"],
                env=record["env"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            words = f"cannot start {record['argv'][0]}: {error.strerror}"
            output.write(words.encode() + b"\n")
            runs.write_exit(run_dir, {"code": 127, "signal": None, "reason": "crashed", "detail": words})
            return 1
    pane, clock, limit = Pane(log), logtimes.Writer(run_dir), loglimit.Limiter(log)
    speed = baseline.Keeper(run_dir, record)
    while trainer.poll() is None:
        pane.show()
        if clock.due():
            clock.note()
            limit.enforce()
        if speed.due():
            speed.note()
        time.sleep(POLL_S)
    pane.show()
    speed.note()
    runs.write_exit(run_dir, judge_exit(run_dir, trainer.returncode))
    return 0


class Pane:
    """Copies the log to the terminal as it grows; a terminal that fails once is not used again."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.at = tail_offset(log, PANE_LINES, CHUNK)
        self.alive = True

    def show(self) -> None:
        while self.alive:
            try:
                with open(self.log, "rb", buffering=0) as file:
                    self.at = min(self.at, file.seek(0, os.SEEK_END))
                    file.seek(self.at)
                    block = file.read(CHUNK)
                if not block:
                    return
                os.write(1, block)
                self.at += len(block)
            except OSError:  # EIO: the tmux server is gone
                self.alive = False


def judge_exit(run_dir: str, returncode: int) -> dict[str, Any]:
    """How the trainer ended, in `exit.json`'s words: from its status, its last phase, an operator's wish."""
    phase = (read_json(os.path.join(run_dir, "state.json")) or {}).get("phase")
    wished = os.path.exists(os.path.join(run_dir, "stop.json"))
    if returncode < 0:
        name = procs.signal_name(-returncode)
        asked = wished and name in ("SIGTERM", "SIGKILL")
        detail = f"killed by {name}" + (" when an operator stopped it" if asked else "")
        reason = "stopped" if asked else "crashed"
        return {"code": 128 - returncode, "signal": name, "reason": reason, "detail": detail}
    facts: dict[str, Any] = {"code": returncode, "signal": None}
    if returncode == 0 and phase in ("finished", "stopped"):
        return {**facts, "reason": phase, "detail": ""}
    if returncode == 0:
        return {**facts, "reason": "crashed", "detail": f"ended with status 0 in phase {phase or 'none'}"}
    last = next(iter(tail_lines(os.path.join(run_dir, "train.log"), 1)), "no output")
    return {**facts, "reason": "crashed", "detail": last[:300]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
