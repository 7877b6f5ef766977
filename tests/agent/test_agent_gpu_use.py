"""Who uses a card, and whether its memory is back: told where it is seen, unknown where nobody answers."""

from __future__ import annotations

import io
import json
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import IO, Any

import jsonschema
import pytest

from agent import gpu, gpu_health, procs, stop
from agent.call import Call, Roots
from agent.frames import Frames
from controller import stopping
from tests.agent.conftest import Box
from tests.agent.recorded_card import (
    LONG_ROWS,
    PATIENT_S,
    ROOT,
    ROWS,
    Player,
    hung_question,
    installed,
    judged,
    said,
)
from tests.record_nvidia_smi import APPLICATIONS


@pytest.fixture
def player(box: Box, monkeypatch: pytest.MonkeyPatch) -> Player:
    return installed(box, monkeypatch)


def without_processes(text: str) -> str:
    """As in a container, where the driver lists nobody, or host process ids that mean nothing."""
    return re.sub(r"<process_info>.*?</process_info>", "", text, flags=re.DOTALL)


def test_memory_counts_whether_or_not_the_driver_lists_who_holds_it(player: Player) -> None:
    pid, _, held = said("busy", APPLICATIONS).strip().split(", ")
    assert said("idle", APPLICATIONS) == ""
    assert f"<pid>{pid}</pid>" in said("busy", gpu_health.LONG)
    assert int(held) < ROWS["busy"]["memory_used_mib"], "the driver's own part is in no process's row"
    player.play("busy", edit=without_processes)
    assert player.health()["rows"] == [LONG_ROWS["busy"]] and player.row() == ROWS["busy"]


def test_a_card_that_nobody_here_holds_is_told_as_in_use(player: Player) -> None:
    """Another container's work: no process is listed, no device file is open here."""
    facts = {"nodes": [], "driver": {"kernel": None, "userland": []}, "alive": [], "stale": []}
    player.play("idle")
    assert judged({**facts, "gpus": player.health()})["memory"].state == "ok"
    player.play(
        "busy", edit=lambda text: without_processes(text).replace("<used>883 MiB", "<used>130914 MiB")
    )
    seen = judged({**facts, "gpus": player.health()})["memory"]
    assert seen.state == "warning" and "GPU 0: up to 128 GiB in use" in seen.says
    assert seen.says.endswith("though no run is alive")
    assert "nobody in this container holds it" in seen.mend


@pytest.mark.parametrize("elements", ["without processes", "with processes"])
def test_a_card_at_work_is_told_however_little_memory_it_takes(player: Player, elements: str) -> None:
    facts = {"nodes": [], "driver": {"kernel": None, "userland": []}, "alive": [], "stale": []}
    player.play("busy", edit=without_processes if elements == "without processes" else str)
    facts["gpus"] = player.health()
    seen = judged(facts)["memory"]
    assert seen.state == "warning"
    assert seen.says == "GPU 0: at work up to 98 % of the time, though no run is alive"
    assert seen.mend == "nobody in this container holds it: on pve1.example.org: fuser -v /dev/nvidia*"
    facts["stale"] = [{"pid": 3120, "command": "python3 train.py", "devices": ["/dev/nvidia0"]}]
    seen = judged(facts)["memory"]
    assert "pid 3120" in seen.mend and "invoke status" in seen.mend and "kill" not in seen.mend
    facts["alive"] = [{"id": "r-0001", "kernels": None}]
    assert judged(facts)["memory"].says == "in use by r-0001"


def test_a_driver_that_scrubs_memory_at_its_start_is_nobody_at_work(player: Player) -> None:
    """Without persistence it starts for each nvidia-smi, and the scrubbing counts as utilisation."""
    facts = {"nodes": [], "driver": {"kernel": None, "userland": []}, "alive": [], "stale": []}
    player.play("idle", edit=lambda text: text.replace("<gpu_util>0 %", "<gpu_util>100 %"))
    assert player.health()["rows"] == [{**LONG_ROWS["idle"], "utilization_pct": 100}]
    assert judged({**facts, "gpus": player.health()})["memory"].state == "ok"
    unread = [
        {**LONG_ROWS["busy"], "memory_used_mib": None}
    ]  # memory that is the host's has no count of its own
    assert judged({**facts, "gpus": {"status": "ok", "rows": unread}})["memory"].state == "warning"


@pytest.mark.parametrize("started", [True, False], ids=["a lock file", "a socket, as after a boot"])
def test_who_holds_a_card_is_told_but_for_a_looks_own_questions(
    player: Player, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    if started:
        Path(player.run_root).mkdir()
    monkeypatch.setattr(gpu, "DEVICES", str(tmp_path / "nvidia"))
    (device := tmp_path / "nvidia0").touch()
    player.play("idle", hangs=True, device=str(device))
    smi, shell = (
        ["nvidia-smi", "-q", "-x"],
        ["sh", "-c", 'exec 9<"$0"; exec sleep 900', str(device)],
    )
    foreign = [subprocess.Popen(argv, stdin=subprocess.DEVNULL) for argv in (smi, shell, shell)]
    ours = [gpu.ask(player.run_root, 0.0, argv).child for argv in (smi, shell)]
    children = [*foreign, *(child for child in ours if child is not None)]
    try:
        assert len(children) == 5, "each got its lock"
        deadline = time.monotonic() + PATIENT_S
        while len(procs.device_holders(str(device))) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert set(procs.device_holders(str(device))) == {child.pid for child in children}
        found = gpu.holders(player.run_root, {foreign[2].pid})
        assert {row["pid"] for row in found} == {child.pid for child in foreign[:2]}
        assert all(row["devices"] == [str(device)] and row["command"] for row in found)
        assert Path(player.run_root).exists() == started, "a look changes nothing"
    finally:
        for child in children:
            child.kill()
            child.communicate()


STOP = {"run": None, "grace_s": 900.0, "gpu_wait_s": 0.0, "reason": None}


def stop_of(roots: Roots, told: IO[bytes]) -> Call:
    return Call("stop", "0", STOP, roots, {}, Frames(told.fileno(), "0"), io.BytesIO(), {})


def test_memory_that_nobody_can_ask_for_after_a_stop_is_unknown_and_not_given_back(
    player: Player, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path(player.run_root).mkdir()
    monkeypatch.setattr(gpu, "query", partial(gpu.query, deadline_s=PATIENT_S))
    roots = Roots("/nowhere", "/nowhere", "/nowhere", player.run_root)

    def after() -> tuple[list[dict[str, Any]], list[str]]:
        """The GPUs of the answer, and what `abort` says beyond its first line."""
        with (tmp_path / "told").open("wb") as told:
            gpus = stop._await_memory(stop_of(roots, told), {0: 130914})
        progress = {"step": 40, "checkpoint": {"step": 40, "path": "/p"}, "lost_steps": 0, "waited_s": 2.0}
        result = {"outcome": "stopped", "run": "r-0001", **progress, "killed": [], "gpus": gpus}
        answer = {"box": "lab", "vmid": 200, "exit_code": 0, **result, "survivors": []}
        schema = json.loads((ROOT / "docs/schema/abort.json").read_text("utf-8"))
        jsonschema.validate({"schema": 1, "task": "abort", "exit_code": 0, "boxes": [answer]}, schema)
        return gpus, stopping.text(result).splitlines()[1:]

    player.play("busy", edit=lambda text: text.replace("883, 143771", "130914, 143771"))
    assert stop._memory(roots) == {0: 130914}
    (full,), lines = after()
    assert (full["used_mib"], full["back"]) == (130914, False)
    assert lines == ["  GPU 0 still has 130914 MiB in use, held by nobody we can see"]
    with hung_question(player.run_root):
        (unknown,), lines = after()
    assert unknown == {**full, "used_mib": None, "back": None}
    why = "nvidia-smi tells it no more, so whether it is back is unknown: invoke doctor"
    assert lines == [f"  memory of GPU 0: {why}"]
    player.play("idle")
    (free,), lines = after()
    assert (free["used_mib"], free["back"], lines) == (0, True, [])


def test_a_stop_whose_driver_hangs_already_says_that_it_cannot_know(
    ready: Box, player: Player, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert ready.start().result["run"] == "r-0001"
    monkeypatch.setattr(stop, "_holds_gpu", lambda run_dir: True)
    with (tmp_path / "told").open("wb") as told, hung_question(player.run_root):
        result = stop.stop(stop_of(Roots(**ready.roots), told))
    assert (result["outcome"], result["gpus"], result["survivors"]) == ("stopped", [], [])
    why = "nvidia-smi does not tell the GPUs' memory: whether it comes back stays unknown"
    assert why in (tmp_path / "told").read_text()
