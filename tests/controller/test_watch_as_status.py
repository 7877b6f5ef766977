"""A watch says what `status` says at the same moment, whatever it saw before.

Every recorded snapshot becomes a container: its run's files are real and both sides' own code reads them;
what the machine itself would tell (processes, GPUs, disks, the clock) is put in its place.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import baseline, gpu, kernel_log, lock, procs, snapshot, tmux
from agent import watch as agents_watch
from agent.call import Call, Roots, check_args
from agent.frames import Frames
from controller import render, status
from controller.verdict import judge
from controller.watch_state import Seen

Json = dict[str, Any]

SCREENS = Path(__file__).resolve().parent.parent / "golden" / "screens"
CASES = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(SCREENS.glob("*.json"))}
RUNS = sorted(name for name, case in CASES.items() if (case["snapshot"] or {}).get("run"))
RECORDS = ("exit", "stop", "attempts", "notify", "state")
PROGRAMS = {"supervisor": "agent.supervise", "notifier": procs.NOTIFIER}


class Container:
    def __init__(self, base: Path, patch: pytest.MonkeyPatch) -> None:
        self.base, self.facts, self.clock = base, {}, 1000.0
        self.roots = Roots(*(f"{base}/{name}/pctrun" for name in ("opt", "var/lib", "var/cache", "run")))
        self.nowhere = os.open(os.devnull, os.O_WRONLY)
        for module in (snapshot, agents_watch):
            clocks = SimpleNamespace(time=lambda: self.facts["now"], monotonic=lambda: self.clock)
            patch.setattr(module, "time", clocks)
        patch.setattr(procs, "marked", self._marked)
        patch.setattr(procs, "booted", lambda: self.facts.get("booted"))
        patch.setattr(gpu, "ask", lambda *_: object())
        patch.setattr(gpu, "settled", lambda _: True)
        patch.setattr(gpu, "answer", lambda _: copy.deepcopy(self.facts["gpus"]))
        patch.setattr(kernel_log, "xids", lambda: self.facts.get("xids"))
        patch.setattr(lock, "owner", lambda *_: self.facts["lock"])
        patch.setattr(tmux, "has_session", lambda *_: self.facts["run"].get("tmux", False))
        patch.setattr(gpu, "holders", lambda *_: copy.deepcopy(self.facts["stale"]))
        patch.setattr(snapshot, "disks", lambda _: copy.deepcopy(self.facts["disks"]))
        patch.setattr(snapshot, "disk", lambda _: self.facts["shm"])
        patch.setattr(baseline, "path", lambda *_: f"{base}/baseline.json")

    def call(self, verb: str, args: Json) -> Call:
        return Call(verb, "", args, self.roots, {}, Frames(self.nowhere, ""), io.BytesIO(), {})

    def status(self) -> Json:
        wishes = check_args("snapshot", snapshot.ARGS, status.look_args())
        return json.loads(json.dumps(snapshot.run(self.call("snapshot", wishes))))

    def become(self, told: Json) -> None:
        """The recorded snapshot is what a look sees from now on."""
        self.facts = copy.deepcopy(told)
        for disk in self.facts["disks"]:
            disk["path"] = f"{self.base}{disk['path']}"  # the log's own path decides which is the run's
        self.clock += 60.0
        run = self.facts["run"]
        folder = Path(self.roots.runs, run["id"])
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in (("run", run["record"]), *((name, run.get(name)) for name in RECORDS)):
            self._write(folder / f"{name}.json", value and json.dumps(value))
        self._write(folder / "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in run["metrics"]))
        best = run.get("baseline")
        self._write(self.base / "baseline.json", best and json.dumps({"runs": [best] * best.get("runs", 1)}))
        self._write_log(folder, run["log"])
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for each in run["checkpoints"]:
            place = folder / "checkpoints" / f"step-{each['step']:06d}"
            place.mkdir(parents=True)
            (place / "complete.json").write_text(json.dumps({"step": each["step"]}))
            os.utime(place / "complete.json", (each["at"], each["at"]))
            with (place / "weights").open("wb") as file:
                file.truncate(each["bytes"] or 0)

    def _write_log(self, folder: Path, log: Json | None) -> None:
        if log is None:
            (folder / "train.log").unlink(missing_ok=True)
            return
        with (folder / "train.log").open("a") as file:  # what was said before stands above another attempt
            lines = [*log["traceback"], *(line for line in log["tail"] if line not in log["traceback"])]
            file.writelines(f"{line}\n" for line in ("· attempt 2 of 4 begins", *lines))
        os.utime(folder / "train.log", (log["mtime"], log["mtime"]))
        grown, now = log.get("growth"), self.facts["now"]
        times = grown and f"{now - grown['seconds']} 0\n{now - 1} {grown['bytes']}\n"
        self._write(folder / "log.times", times)

    @staticmethod
    def _write(path: Path, text: str | None) -> None:
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)

    def _marked(self) -> dict[str, list[procs.Proc]]:
        run = self.facts["run"]
        folder = f"{self.roots.runs}/{run['id']}"
        ids = {each["role"]: each["pid"] for each in run["processes"]}
        found = [
            procs.Proc(
                pid=each["pid"],
                ppid=ids.get("supervisor", 1) if each["role"] == "trainer" else 1,
                start=1,
                state=each["state"],
                threads=each["threads"],
                rss_bytes=each["rss_bytes"],
                argv=("python", "-m", PROGRAMS.get(each["role"], "trainer")),
            )
            for each in run["processes"]
        ]
        return {folder: found} if found else {}


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    made = Container(tmp_path, monkeypatch)
    yield made
    os.close(made.nowhere)


def fresh(told: Json) -> Json:
    """The same run a while before, when nothing was wrong with it."""
    early = copy.deepcopy(told)
    early |= {"now": told["now"] - 700, "lock": None, "xids": [], "stale": []}
    early["gpus"] = {"status": "ok", "detail": "", "rows": []}
    for disk in early["disks"]:
        disk |= {"free_bytes": 1 << 40, "inodes_free": 1 << 20}
    run, now = early["run"], early["now"]
    run |= dict.fromkeys(("exit", "stop", "attempts", "notify", "baseline")) | {"tmux": True}
    run |= {"metrics": run["metrics"][:-5], "checkpoints": run["checkpoints"][:-1]}
    run["log"] = {"path": "", "mtime": now - 1, "tail": ["the first line"], "traceback": []}
    run["processes"] = copy.deepcopy(CASES["healthy"]["snapshot"]["run"]["processes"])
    pid = next(each["pid"] for each in run["processes"] if each["role"] == "trainer")
    moments = dict.fromkeys(("heartbeat", "progress_at", "phase_since", "training_since"), now - 1)
    run["state"] = {"pid": pid, "phase": "training", "step": len(run["metrics"]), "steps": 120, **moments}
    return early


def ill(told: Json) -> Json:
    """Before, and all was wrong that can be wrong with a living run."""
    early = fresh(told)
    early["gpus"] = {"status": "timeout", "detail": "nvidia-smi hangs", "rows": []}
    early["stale"] = [{"pid": 999, "command": "python", "devices": ["/dev/nvidia0"]}]
    early["xids"] = [{"at": early["now"] - 1, "bus": "0000:43:00", "number": 79, "text": "off the bus"}]
    for disk in early["disks"]:
        disk |= {"free_bytes": 0, "inodes_free": 0}
    run = early["run"]
    run |= {"tmux": None, "baseline": {"run": "r-0001", "tokens_per_s": 1e9, "runs": 1}, "record": None}
    run["log"] |= {"traceback": ["Traceback (most recent call last):", "  File", "ValueError: early"]}
    run["notify"] = {"failed": {"word": "stalled", "at": 1.0, "texts": ["json://…: refused"]}}
    crash = {"at": 1.0, "again_at": 9e9, "says": "KeyError"}
    run["attempts"] = {"limit": 3, "restarted": 0, "crashes": [crash]}
    run["checkpoints"] = [{"step": 7, "path": "", "at": 1.0, "bytes": 1 << 40}]
    return early


def ahead(told: Json) -> Json:
    """An attempt that came further, and whose steps the next one has taken back."""
    early = fresh(told)
    early["run"]["metrics"] = [
        {"step": step, "loss": 99.0, "tokens": 1, "step_s": 9.0} for step in range(1, 400)
    ]
    return early


def launched(told: Json) -> Json:
    """Its folder alone."""
    early = fresh(told)
    early["lock"] = {"operator": {"user": "ana", "host": "desk"}, "verb": "restart", "since": 1.0, "pid": 1}
    early["run"] |= {"record": None, "state": None, "log": None, "processes": []}
    early["run"] |= {"metrics": [], "checkpoints": [], "tmux": False}
    return early


def lingering(told: Json) -> Json:
    """The snapshot with a process that has not ended with the run."""
    late = copy.deepcopy(told)
    about = {"role": "notifier", "state": "S", "rss_bytes": 1 << 20, "threads": 1}
    late["run"]["processes"].append({"pid": 4999, **about})
    return late


@pytest.mark.parametrize("before", [fresh, ill, ahead, launched])
@pytest.mark.parametrize("name", RUNS)
def test_a_watch_says_what_status_says(container: Container, name: str, before: Any) -> None:
    case = CASES[name]
    for told in (case["snapshot"], lingering(case["snapshot"])):
        container.become(before(told))
        seen = Seen()
        watch = agents_watch._Watch(container.call("watch", check_args("watch", agents_watch.ARGS, {})))
        seen.take(json.loads(json.dumps(watch.look()[0])))
        container.become(told)
        for _ in range(3):  # GPUs and disks come every few seconds, tmux when it has answered
            container.clock += 30.0
            seen.take(json.loads(json.dumps(watch.look()[0])))
            for thread in threading.enumerate():
                if thread.name == "pctrun-tmux":
                    thread.join()
        now = container.status()
        found, expected = judge(seen.snapshot, gpus=case.get("gpus")), judge(now, gpus=case.get("gpus"))
        assert found == expected
        assert expected.word == case["word"]
        screens = [render.screen("lab/200", found, each) for each in (seen.snapshot, now)]
        assert screens[0] == screens[1]
