"""What a busy machine brings to light: a pane that takes nothing, a trainer that starts between two looks."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agent import procs, snapshot
from tests.faults.table import fault

AGENT_HOME = Path(__file__).resolve().parents[2] / "remote_payload"
CHATTY = "import sys; sys.stdout.write(('x' * 99 + '\\n') * 50_000)"  # 5 MB, more than any terminal holds


@fault(
    "a tmux server that is stopped or slower than the log",
    promised="the trainer's end is seen and written at once; the pane leaves lines out",
    seen="`exit.json` within seconds behind a terminal that takes nothing, after 5 MB of log",
    part="process",
)
def test_a_terminal_that_takes_nothing_does_not_hide_the_trainers_end(tmp_path: Path) -> None:
    """As a tmux server that is stopped, or in a log of 5 MB a second: the pane is only a window."""
    run = tmp_path / "r-0001"
    run.mkdir()
    record = {"argv": [sys.executable, "-c", CHATTY], "env": dict(os.environ), "release_dir": str(tmp_path)}
    (run / "run.json").write_text(json.dumps(record))
    ours, its = pty.openpty()
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "agent.supervise", str(run)], cwd=AGENT_HOME, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    try:
        assert supervisor.wait(60) == 0
        assert json.loads((run / "exit.json").read_text())["code"] == 0
        assert (run / "train.log").stat().st_size == 5_000_000
    finally:
        supervisor.kill()
        supervisor.wait()
        os.close(ours)


def test_a_trainer_that_starts_between_the_two_looks_has_not_vanished(tmp_path: Path) -> None:
    """The processes were listed before it was there; its state was read when it trained already."""
    run = tmp_path / "r-0001"
    run.mkdir()
    before = procs.marked()
    marks = {**os.environ, "PCTRUN_RUN_ID": run.name, "PCTRUN_RUN_DIR": str(run)}
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=marks)
    looks = []

    def look(marked: dict[str, list[procs.Proc]]) -> dict[str, Any]:
        looks.append(marked)
        state = {"pid": trainer.pid, "phase": "training"}
        return {
            "state": state,
            "exit": None,
            "processes": snapshot.processes(marked.get(str(run), []), state),
        }

    try:
        while str(run) not in procs.marked():
            time.sleep(0.01)
        assert str(run) not in before
        seen = snapshot.settled(look, before)
        assert [proc["role"] for proc in seen["processes"]] == ["trainer"]
        assert len(looks) == 2
    finally:
        trainer.kill()
        trainer.wait()
    looks.clear()
    assert snapshot.settled(look, before)["processes"] == []  # it is gone for good: looked at twice, no more
    assert len(looks) == 2
