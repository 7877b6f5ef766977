"""A run tells how it is while the workstation sleeps: the same verdicts, sent from beside it.

It is a process of the run's own (agent/notifying.py starts it) and cannot disturb the trainer: it looks as
`status` does, at the lowest priority. What it must know comes on stdin, its opinion from the controller.
`notify.json` says what it sent and what did not get out.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any, Callable, NamedTuple

from agent import procs, snapshot
from agent.call import Call, Json, Roots
from agent.files import read_json, write_json
from agent.frames import Frames

NAME = "notify.json"
LOOK_S = 15.0
LOOK = {"log_lines": 12, "metrics_lines": 200, "gpu_deadline_s": 5.0}
KEPT = 20  # messages that notify.json remembers


class Opinion(NamedTuple):
    """What the controller knows: `judge(snapshot, gpus=…, vmid=…)`, `changes(when, known)`, `message(label,
    verdict, snapshot, hide)`, and a module `post` with `send(urls, message)` and `unusable(urls)`."""

    judge: Callable[..., Any]
    changes: Callable[..., Any]
    message: Callable[..., Json]
    post: Any


def main(opinion: Opinion) -> int:
    """Watch the run of RUN_DIR (the last argument) to its end.

    stdin: a line of JSON `{urls, when, box, gpus, vmid, look_s, hide, roots}`, then nothing; its end means
    that the supervisor has written how the run ended, or is gone.
    """
    run_dir = sys.argv[-1]
    wish = json.loads(sys.stdin.readline())
    os.nice(19)
    for name in (
        procs.RUN_ID,
        procs.RUN_DIR,
    ):  # what a look starts is none of the run's: a stop must not meet it
        os.environ.pop(name, None)
    watcher = Watcher(run_dir, wish, opinion)
    watcher.note_failure("", opinion.post.unusable(watcher.urls))  # said by the first status, not by silence
    attended = True
    while True:
        if attended:
            attended = not select.select([sys.stdin], [], [], watcher.look_s)[0]
        else:
            time.sleep(min(1.0, watcher.look_s))  # nobody says any more when it is over
        over = watcher.over()  # before the look: what is written after it belongs to the next one
        try:
            watcher.look()
        except Exception as error:  # a disk that fails for a moment, a defect of ours: the next look may do
            watcher.note_failure("", [f"a look failed: {type(error).__name__}"])
        if over:
            return 0


class Watcher:
    def __init__(self, run_dir: str, wish: Json, opinion: Opinion) -> None:
        self.run_dir, self.opinion = run_dir, opinion
        self.urls, self.when = wish["urls"], wish["when"]
        self.box, self.gpus, self.hide = wish["box"], wish["gpus"], wish["hide"]
        self.vmid = wish.get("vmid")  # a supervisor of an older release passes none on
        self.look_s = float(wish.get("look_s") or LOOK_S)
        self.changes = opinion.changes(self.when, "starting")
        self.sent: list[Json] = []
        self.failed: Json | None = None
        args = {**LOOK, "run": os.path.basename(run_dir)}
        nowhere = Frames(os.open(os.devnull, os.O_WRONLY), "")
        roots = Roots(**wish["roots"])
        self.call = Call("snapshot", "", args, roots, {}, nowhere, sys.stdin.buffer, {})

    def over(self) -> bool:
        """Nothing more will happen: it was written down, or nobody is left who could do anything."""
        if os.path.exists(os.path.join(self.run_dir, "exit.json")):
            return True
        state = read_json(os.path.join(self.run_dir, "state.json"))
        found = procs.roles(procs.scope(self.run_dir), state)
        return found.supervisor is None and found.trainer is None

    def look(self) -> None:
        facts = snapshot.run(self.call)
        verdict = self.opinion.judge(facts, gpus=self.gpus, vmid=self.vmid)
        if not self.changes.take(verdict, facts, time.monotonic()):
            return
        message = self.opinion.message(self.box, verdict, facts, self.hide)
        failures = self.opinion.post.send(self.urls, message)
        if len(failures) < len(self.urls):
            self.sent = [*self.sent, {"word": verdict.word, "at": time.time()}][-KEPT:]
        self.note_failure(verdict.word, failures)

    def note_failure(self, word: str, texts: "list[str]") -> None:
        """Remember what did not get out, or that all did."""
        self.failed = {"word": word, "at": time.time(), "texts": texts} if texts else None
        self.write()

    def write(self) -> None:
        facts = {"schema": 1, "pid": os.getpid(), "when": self.when, "addresses": len(self.urls)}
        try:
            write_json(
                os.path.join(self.run_dir, NAME),
                {**facts, "sent": self.sent, "failed": self.failed},
            )
        except OSError:
            pass  # a full disk: the message is out all the same
