"""What doctor says of a box in every kind of trouble, from facts as the host and the agent give them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from controller import causes, checklist, checks, doctor, pct, verdict
from controller.checks import Check
from controller.endpoint import Endpoint
from controller.errors import ConnectionLost, HostKeyRefused, LoginRefused, PctrunError, Unreachable
from controller.inventory import Roots

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs/schema/doctor.json").read_text("utf-8"))
FACTS: dict[str, Any] = json.loads((ROOT / "tests/golden/doctor/eight-gpus.json").read_text("utf-8"))
ENDPOINT = Endpoint(
    "pve1.example.org", 200, "/usr/bin/python3", "/opt/pctrun/venv/current/bin/python", "root"
)
SCREENS = ROOT / "tests/golden/screens"
GIB = 2**30
# what the trainer says in an environment of env.build (tests/trainer/test_installing.py)
LOCK_LINE = "add flash-linear-attention to the lock of this environment, then invoke env.build --lock FILE"


@dataclass
class Scene:
    """A box with eight idle, healthy GPUs, ready to train; a case changes what is wrong with it."""

    host: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(FACTS["host"]))
    container: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(FACTS["container"]))
    gpus: int | None = 8
    way: PctrunError | None = None
    host_error: PctrunError | None = None
    container_error: PctrunError | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.container["gpus"]["rows"])

    def found(self) -> doctor.Findings:
        return doctor.Findings(
            endpoint=None if self.way else ENDPOINT,
            connect_s=0.21,
            way=self.way,
            host=None if self.way or self.host_error else self.host,
            host_error=self.host_error,
            container=None if self.way or self.container_error else self.container,
            container_error=self.container_error,
            round_trips=0 if self.way else 2,
        )

    def judge(self) -> list[Check]:
        return doctor.judge(self.found(), gpus=self.gpus, ours="0b2f6c1d9a7e4455", roots=Roots())


Change = Callable[[Scene], None]
CASES: dict[str, tuple[Change, int]] = {}


def case(code: int) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        CASES[change.__name__.replace("_", "-")] = (change, code)
        return change

    return register


@case(0)
def ready(scene: Scene) -> None:
    pass


@case(7)
def no_answer(scene: Scene) -> None:
    scene.way = Unreachable("pve1.example.org does not answer within 15 s", "is it up, is the way free?")


@case(7)
def host_key_changed(scene: Scene) -> None:
    scene.way = HostKeyRefused("the host key of pve1.example.org has changed", "compare it on its console")


@case(7)
def login_refused(scene: Scene) -> None:
    scene.way = LoginRefused("pve1.example.org refused the login of root", "add your key")


@case(5)
def container_off(scene: Scene) -> None:
    scene.host.update(status="stopped", status_text="status: stopped")
    scene.container_error = PctrunError("container 200 on pve1.example.org is not running")


@case(7)
def container_elsewhere(scene: Scene) -> None:
    text = "Configuration file 'nodes/pve1/lxc/200.conf' does not exist"
    scene.host.update(status=None, status_code=2, status_text=text)
    scene.container_error = PctrunError("container 200 does not exist")


@case(7)
def no_pct(scene: Scene) -> None:
    """What the host's sh says where there is none, and what `pct exec` then comes to."""
    text = "sh: 19: pct: not found"
    scene.host.update(pct=None, packages={}, status=None, status_code=127, status_text=text, lock=None)
    scene.container_error = pct.explain(ENDPOINT, 127, text)


@case(7)
def agent_lost(scene: Scene) -> None:
    scene.container_error = ConnectionLost("lost pve1.example.org: no answer within 360 s", "look again")


@case(2)
def locked_and_wrong_clock(scene: Scene) -> None:
    scene.host.update(lock="backup", skew_s=-94.2, packages={}, dmesg=False, xids=[])


@case(9)
def bare_container(scene: Scene) -> None:
    scene.container["tmux"] = {"path": None, "version": None}
    scene.container["release"] = {"current": None, "patches_fx": False}
    python = {
        "error": "there is no interpreter /opt/pctrun/venv/current/bin/python",
        "hint": "check `python`",
    }
    scene.container["python"] = python
    scene.container["recipe"] = {"error": "there is no release to read it with", "hint": "invoke deploy"}
    scene.container["caches"] = {"current": None, "rows": [], "legacy": []}
    scene.container["kernels"] = {"skipped": "the python is not usable yet"}


@case(9)
def no_room(scene: Scene) -> None:
    scene.container["disks"][0].update(free_bytes=9 * GIB, inodes_free=900)
    scene.container["shm"].update(free_bytes=32 * GIB)
    scene.container["recipe"].update(checkpoint_bytes=21 * GIB)


@case(2)
def a_larger_shm_while_a_run_is_alive(scene: Scene) -> None:
    scene.container["shm"].update(free_bytes=32 * GIB)
    scene.container["alive"] = [{"id": "r-0007", "kernels": {"attention": "x", "slow": []}}]
    scene.container["kernels"] = {"skipped": "r-0007 is using the GPUs, and proved its own at its start"}


@case(2)
def a_larger_shm_of_a_locked_container(scene: Scene) -> None:
    scene.container["shm"].update(free_bytes=32 * GIB)
    scene.host.update(lock="backup")


@case(9)
def wrong_recipe_and_another_release(scene: Scene) -> None:
    scene.container["release"]["current"] = "77aa55cc11223344"
    error = "recipes/qwen3.6-27b.yaml:12: train.stepz is unknown; did you mean train.steps?"
    scene.container["recipe"] = {"error": error, "hint": ""}
    scene.container["kernels"] = {"skipped": "the recipe is not usable yet"}


@case(9)
def no_model(scene: Scene) -> None:
    scene.container["recipe"].update(model_bytes=None)


@case(9)
def seven_of_eight_gpus(scene: Scene) -> None:
    del scene.rows[7]
    scene.container["gpus"]["rows"] = scene.rows[:7]
    scene.host["gpus"] = scene.host["gpus"][:7]
    scene.host["xids"] = ["[86000.250] NVRM: Xid (PCI:0000:c1:00): 79, pid=0, GPU has fallen off the bus."]


@case(9)
def gpus_not_passed(scene: Scene) -> None:
    scene.container["gpus"].update(status="error", detail="nvidia-smi ended with 9: No devices were found")
    scene.container["gpus"].update(rows=[], driver=None, cuda=None)
    scene.container["nodes"] = [{"path": "/dev/nvidiactl", "opens": True}]


@case(9)
def no_uvm_and_another_userland(scene: Scene) -> None:
    scene.container["nodes"] = scene.container["nodes"][:-1]
    scene.container["driver"]["userland"] = ["570.172.08"]
    detail = "nvidia-smi ended with 18: Failed to initialize NVML: Driver/library version mismatch"
    scene.container["gpus"].update(status="error", detail=detail, rows=[], driver=None, cuda=None)
    scene.container["kernels"] = {"error": "RuntimeError: no CUDA device is usable", "hint": ""}


@case(9)
def forbidden_nodes(scene: Scene) -> None:
    for node in scene.container["nodes"]:
        node["opens"] = False


@case(9)
def hanging_driver(scene: Scene) -> None:
    for node in scene.container["nodes"]:
        node["opens"] = None
    detail = "nvidia-smi hangs in the driver for 512 s (pid 4711, state D)"
    scene.container["gpus"].update(status="timeout", detail=detail, rows=[], driver=None, cuda=None)
    why = "nvidia-smi does not answer, and the proof would hang as it does"
    scene.container["kernels"] = {"skipped": why}


@case(9)
def sick_gpus(scene: Scene) -> None:
    scene.rows[2].update(ecc_uncorrectable=3, repairs_pending=["row"])
    scene.rows[5].update(recovery="Reset")
    scene.rows[6].update(throttle=["hw_slowdown", "hw_thermal_slowdown"], temperature_c=91.0)
    scene.host["xids"] = ["[86390.010] NVRM: Xid (PCI:0000:43:00): 94, pid=812, Contained memory error"]


@case(9)
def worn_out_gpus(scene: Scene) -> None:
    scene.rows[1].update(beyond_repair=["row"])
    scene.rows[2].update(repairs_pending=["channel", "tpc"], recovery="Reset")
    scene.rows[3].update(beyond_repair=["memory", "sram"], ecc_uncorrectable=7)
    scene.rows[4].update(repairs_pending=["tpc"])


@case(2)
def held_by_others(scene: Scene) -> None:
    scene.rows[0].update(memory_used_mib=81_000.0)
    scene.rows[1].update(memory_used_mib=9_000.0)
    stale = {
        "pid": 3120,
        "command": "python3 -m vllm.entrypoints.openai.api_server",
        "devices": ["/dev/nvidia0"],
    }
    scene.container["stale"] = [stale]


@case(2)
def another_at_work(scene: Scene) -> None:
    scene.rows[0].update(memory_used_mib=81_000.0)
    for row in scene.rows[:2]:
        row.update(utilization_pct=98.0, throttle=["sw_power_cap"])
    scene.rows[1].update(memory_used_mib=883.0)
    scene.container["stale"] = [
        {"pid": 3120, "command": "python3 train.py", "devices": ["/dev/nvidia0", "/dev/nvidia1"]}
    ]


@case(9)
def slow_kernels(scene: Scene) -> None:
    line = scene.container["kernels"]["reports"][0]["lines"][2]
    line.update(fast=False, why="flash-linear-attention: fla is not installed", mend=LOCK_LINE)


@case(9)
def slow_kernels_of_a_python_with_pip(scene: Scene) -> None:
    slow_kernels(scene)
    line = scene.container["kernels"]["reports"][0]["lines"][2]
    line.update(mend="/root/venv/bin/python -m pip install flash-linear-attention")


@case(9)
def cpu_build_of_torch(scene: Scene) -> None:
    scene.container["python"]["torch"]["cuda"] = None
    scene.container["python"]["versions"]["torch"] = "2.11.0+cpu"
    scene.container["kernels"] = {"error": "Torch not compiled with CUDA enabled", "hint": ""}


@case(0)
def torch_whose_tracing_flag_is_a_threads_own(scene: Scene) -> None:
    scene.container["python"]["versions"]["torch"] = "2.14.0+cu130"
    scene.container["release"]["patches_fx"] = False


@case(9)
def no_patch_for_a_shared_tracing_flag(scene: Scene) -> None:
    scene.container["release"]["patches_fx"] = False


@case(9)
def old_driver(scene: Scene) -> None:
    scene.container["gpus"]["cuda"] = "12.4"


@case(0)
def a_run_is_alive(scene: Scene) -> None:
    scene.container["alive"] = [{"id": "r-0007", "kernels": {"attention": "x", "slow": []}}]
    scene.container["kernels"] = {"skipped": "r-0007 is using the GPUs, and proved its own at its start"}
    for row in scene.rows:
        row.update(memory_used_mib=131_000.0, throttle=["sw_power_cap"])


@case(2)
def a_run_on_reference_kernels(scene: Scene) -> None:
    slow = "recurrence by transformers' torch_chunk_gated_delta_rule: fla is not installed"
    scene.container["alive"] = [{"id": "r-0007", "kernels": {"slow": [slow]}}]
    scene.container["kernels"] = {"skipped": "r-0007 is using the GPUs, and proved its own at its start"}


@case(0)
def no_gpu_wanted(scene: Scene) -> None:
    scene.gpus = None
    scene.host.update(driver=None, gpus=[])
    scene.container.update(nodes=[], driver={"kernel": None, "userland": []})
    absent = {"status": "absent", "detail": "no NVIDIA GPU in this container", "rows": []}
    scene.container["gpus"].update(absent, driver=None, cuda=None)
    scene.container["kernels"] = {"skipped": "there is no GPU to prove them on"}


@pytest.mark.parametrize("name", CASES)
def test_the_screen_and_the_exit_code_of(name: str, golden: Callable[[str, str], None]) -> None:
    scene, (change, code) = Scene(), CASES[name]
    change(scene)
    made = scene.judge()
    assert checks.exit_code(made) == code
    screen = checklist.screen("lab/200", made, doctor.alive(scene.found()))
    golden(f"doctor/{name}.txt", screen)
    assert all(len(line) <= checklist.WIDTH or " " not in line.strip() for line in screen.splitlines())
    for check in made:
        if check.state in (checks.FAILED, checks.WARNING):
            assert check.mend, f"{check.name} says what is wrong and not what to do"


@pytest.mark.parametrize("name", CASES)
def test_every_check_is_made_whatever_failed_and_the_document_keeps_its_schema(name: str) -> None:
    scene = Scene()
    CASES[name][0](scene)
    made, found = scene.judge(), scene.found()
    assert [check.name for check in made] == [check.name for check in Scene().judge()]
    document = {
        "checks": [check.as_json() for check in made],
        "counts": checks.counts(made),
        "round_trips": found.round_trips,
        "host": found.host,
        "container": found.container,
    }
    code = checks.exit_code(made)
    box = {"box": "lab", "vmid": 200, "exit_code": code, **document}
    jsonschema.validate({"schema": 1, "task": "doctor", "exit_code": code, "boxes": [box]}, SCHEMA)


def test_the_schema_refuses_a_failed_check_without_a_mend() -> None:
    check = {"group": "gpu", "name": "ecc", "state": "failed", "says": "broken", "mend": ""}
    only_check = {"$ref": "#/$defs/check", "$defs": SCHEMA["$defs"]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(check, only_check)
    jsonschema.validate({**check, "mend": "replace it"}, only_check)


def test_a_host_that_gives_no_answer_does_not_hide_the_container() -> None:
    judged = Scene(host_error=ConnectionLost("lost pve1.example.org: the connection broke")).judge()
    states = {check.name: check.state for check in judged}
    assert states["pct"] == states["clock"] == states["xid"] == "skipped"
    assert states["count"] == states["kernels"] == "ok"


def test_the_disk_of_runs_is_enough_for_doctor_when_it_is_for_status() -> None:
    """The same look, judged by both: one amount of room is too little for either, or for none."""
    run = json.loads((SCREENS / "healthy.json").read_text("utf-8"))["snapshot"]
    for free in (causes.FULL_BYTES - 1, causes.FULL_BYTES):
        scene = Scene()
        scene.container["recipe"].update(checkpoint_bytes=None)
        scene.container["disks"][0].update(free_bytes=free)
        run["run"]["checkpoints"], run["disks"] = [], scene.container["disks"]
        check = next(check for check in scene.judge() if check.name == "disk")
        too_little = free < causes.FULL_BYTES
        assert (check.state == "failed") == ("disk" in verdict.judge(run).causes) == too_little


@pytest.mark.parametrize(
    ("path", "free", "state"),
    [
        ("/run", 200 * 2**20, "ok"),
        ("/run", 2**19, "failed"),
        ("/var/cache", 200 * 2**20, "failed"),
        ("/var/cache", 2 * GIB, "ok"),
        ("/var/lib", 2 * GIB, "failed"),
        ("/var/lib", 50 * GIB, "ok"),
    ],
)
def test_each_disk_must_hold_what_lies_on_it(path: str, free: int, state: str) -> None:
    """Two checkpoints of 20 GiB belong to the runs; locks and sockets need next to nothing."""
    scene = Scene()
    scene.container["disks"].append({**scene.container["disks"][0], "path": path, "free_bytes": free})
    check = next(check for check in scene.judge() if check.name == "disk")
    assert check.state == state, check
    assert (f"{path} " in check.says) and (state == "ok" or "/opt" not in check.says)


def test_old_xids_are_told_and_do_not_alarm() -> None:
    scene = Scene()
    line = "[  100.5] NVRM: Xid (PCI:0000:43:00): 79, GPU has fallen off the bus."
    scene.host.update(uptime_s=9 * 86400.0, xids=[line])
    check = next(check for check in scene.judge() if check.name == "xid")
    assert check.state == "ok" and "8d ago" in check.says
