"""Real processes, files and signals for the agent's tests; `behave` says what goes wrong."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from trainer.describe import LASTS, load

LAST_PHASE = "finished"


def write(path, value):
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


class Training:
    def __init__(self, run_dir, resume=None):
        self.run_dir = run_dir
        record = json.loads((run_dir / "run.json").read_text())
        self.recipe = load(record["recipe"], record["overrides"])
        self.step = record["resume_from"]["step"] if record["resume_from"] else 0
        if resume is not None:
            self.step = json.loads((resume / "complete.json").read_text())["step"]
        self.saved = None
        self.stopping = False
        self.death = self.next_death()

    def next_death(self):
        """What this attempt dies of: `{at, of}`, one of the recipe's `deaths` after the other; then None."""
        noted = self.run_dir / "standin.attempts"
        lived = int(noted.read_text()) if noted.exists() else 0
        noted.write_text(str(lived + 1))
        return next(iter(self.recipe.get("deaths", [])[lived:]), None)

    def die_if_told(self):
        if self.death is None or self.step < self.death["at"]:
            return
        of = self.death["of"]
        if of == "refusal":
            print("refused: the target's folder is gone", file=sys.stderr)
            sys.exit(2)
        if of.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, of))
        raise RuntimeError(of)

    def state(self, phase):
        facts = {"schema": 1, "pid": os.getpid(), "phase": phase, "step": self.step, "heartbeat": time.time()}
        write(self.run_dir / "state.json", {**facts, "last_checkpoint": self.saved})

    def checkpoint(self):
        self.state("checkpointing")
        target = self.run_dir / "checkpoints" / f"step-{self.step:06d}"
        if not target.exists():
            making = target.with_suffix(".tmp")
            making.mkdir(parents=True)
            made_with = {name: self.recipe.get(name) for name in LASTS}
            write(making / "complete.json", {"step": self.step, "made_with": made_with})
            making.rename(target)
        self.saved = {"step": self.step, "path": str(target)}

    def metrics(self):
        """The file, cut to the steps that this attempt stands on."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step))
        return path.open("a")

    def train(self):
        with self.metrics() as metrics:
            while self.step < self.recipe["steps"] and not self.stopping:
                time.sleep(self.recipe["step_s"])
                self.step += 1
                print(f"step {self.step}")
                if "log_bytes" in self.recipe:
                    print(f"{'.' * 99}\n" * (self.recipe["log_bytes"] // 100), end="", flush=True)
                line = {"step": self.step, "loss": 1 / self.step, "time": time.time()}
                if "tokens" in self.recipe:
                    line |= {"tokens": self.recipe["tokens"], "step_s": 1.0, "compile": False}
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
                if self.recipe.get("save_every") and self.step % self.recipe["save_every"] == 0:
                    self.checkpoint()
                self.state("training")
                self.die_if_told()
        self.checkpoint()
        self.state("stopped" if self.stopping else LAST_PHASE)


def eat(training):
    held = []
    while (
        len(held) < 256
    ):  # a GiB: beyond the limit that it is meant to meet, and no more where there is none
        if training.saved is None:
            time.sleep(0.05)
        else:
            held.append(b"x" * (4 << 20))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    training = Training(args.run_dir, args.resume)
    behave = training.recipe["behave"]
    print(f"environment {json.dumps(sorted(os.environ))}")
    if behave == "die":
        raise ValueError("the stand-in dies as it was told")
    if behave == "refuse":
        print("recipes/tiny.yaml:1: no such device", file=sys.stderr)
        return 2
    if behave == "silent":
        time.sleep(3600)
    signal.signal(signal.SIGTERM, lambda *_: setattr(training, "stopping", True))
    if behave == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behave == "escape":  # a child in a session of its own that ignores everything it can
        child = (
            "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(3600)"
        )
        subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    if behave == "fork" and os.fork() == 0:  # the same command line as the trainer, and it outlives it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    training.state("starting")
    if behave == "eat":  # all memory that there is, once it has saved something
        threading.Thread(target=eat, args=(training,), daemon=True).start()
    training.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
