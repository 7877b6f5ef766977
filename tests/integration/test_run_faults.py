"""What a person sees, and what is on disk, when things are killed in mid-run."""

from __future__ import annotations

import json
import random
import time

import pytest

from tests.faults.table import fault


@pytest.fixture(scope="module")
def deployed(tiny):
    tiny.invoke("deploy")
    return tiny


@pytest.fixture
def running(deployed):
    """A long run that has made a checkpoint: the one that the test before has left alive, or a new one."""
    if deployed.status()["verdict"] not in ("healthy", "warming-up", "starting"):
        deployed.ask("restart", "--from-scratch", "--set=train.steps=100000")
    seen = deployed.wait_for(
        lambda s: s["verdict"] == "healthy" and bool(s["snapshot"]["run"]["checkpoints"]), "a checkpoint"
    )
    return deployed, seen["snapshot"]["run"]["id"]


def pid_of(status: dict, role: str) -> int:
    return next(p["pid"] for p in status["snapshot"]["run"]["processes"] if p["role"] == role)


@fault(
    "the trainer is killed by SIGKILL",
    promised="told in one look; resumed at the last checkpoint",
    seen="`crashed`, exit 4, `SIGKILL`",
    part="process",
)
def test_kill_9_of_the_trainer_is_told_in_one_look_and_resumed(running) -> None:
    project, run = running
    ended = f"/var/lib/pctrun/runs/{run}/exit.json"
    kill = f"kill -9 {pid_of(project.status(), 'trainer')}"
    project.sh(f"{kill}; until [ -e {ended} ]; do sleep 0.05; done")
    seen = project.status()
    assert seen["verdict"] == "crashed" and seen["exit_code"] == 4
    assert "SIGKILL" in json.dumps([seen["summary"], seen["reasons"]])
    saved = max(c["step"] for c in seen["snapshot"]["run"]["checkpoints"])
    again = project.ask("restart", "--set=train.steps=100000")["start"]
    assert again["resume_from"]["run"] == run
    assert again["resume_from"]["step"] == saved


@fault(
    "the host gone in mid-run",
    promised="unreachable is never dead; the run goes on",
    seen="exit 7, `unreachable`; with the host back `healthy` and the same run",
    part="way",
)
def test_sandbox_down_in_mid_run_is_unreachable_and_then_the_truth_again(running) -> None:
    project, run = running
    project.invoke("sandbox.down")
    assert "unreachable" in project.invoke("status", code=7).lower()
    project.invoke("sandbox.up")
    seen = project.status()
    assert seen["verdict"] == "healthy"
    assert seen["snapshot"]["run"]["id"] == run


def test_a_foreign_python_survives_restart_and_is_not_stale_without_a_gpu(running) -> None:
    project, _ = running
    sleeper = "setsid python3 -c 'import time; time.sleep(600)' foreign >/dev/null 2>&1 </dev/null & echo"
    find = "ps -eo pid,args | awk '/^ *[0-9]+ python3 .*foreign$/ {print $1; exit}'"
    foreign = project.sh(
        f'{sleeper}; until pid=$({find}) && [ "$pid" ]; do sleep 0.05; done; echo $pid'
    ).strip()
    project.invoke("restart", "--set=train.steps=100000")
    assert project.sh(f"kill -0 {foreign} && echo alive").strip() == "alive"
    assert project.status()["snapshot"]["stale"] == []
    project.invoke("abort")
    assert project.sh(f"kill {foreign} && echo alive").strip() == "alive"


@fault(
    "the tmux server is killed",
    promised="the run goes on without a window; `abort` loses no step",
    seen="`healthy`, then `stopped`",
    part="process",
)
def test_kill_9_of_the_tmux_server_changes_no_truth(running) -> None:
    project, _ = running
    before = project.status()
    server = project.sh("ps -eo pid,args | awk '/tmux -L pctrun/ && !/awk/ {print $1; exit}'").strip()
    project.sh(f"kill -9 {server}")
    step = before["snapshot"]["run"]["state"]["step"]
    seen = project.wait_for(lambda s: s["snapshot"]["run"]["state"]["step"] > step, "the run goes on")
    assert seen["verdict"] == "healthy"
    assert seen["snapshot"]["run"]["tmux"] is False
    assert project.ask("abort")["lost_steps"] == 0
    assert project.status()["verdict"] == "stopped"


def test_abort_loses_nothing_and_a_second_one_has_nothing_to_stop(running) -> None:
    project, _ = running
    first = project.ask("abort")
    assert (first["outcome"], first["lost_steps"], first["survivors"]) == ("stopped", 0, [])
    assert first["checkpoint"]["step"] == first["step"]
    screen = project.invoke("abort")
    assert "nothing to stop" in screen
    assert project.invoke("restart").startswith("started ")  # and says only what it did


def test_a_second_start_is_refused_and_a_wrong_recipe_is_one_line(deployed) -> None:
    seen = deployed.ask("restart", "--recipe", "tniy", code=9)
    assert "tiny" in json.dumps(seen["error"])
    seen = deployed.ask("restart", "--set=train.stepz=5", code=None)
    assert seen["exit_code"] in (1, 9) and "steps" in json.dumps(seen["error"])


@fault(
    "the trainer dies while it starts",
    promised="`restart` or the first look says so, with the reason",
    seen="`crashed`, and the file that it cannot read",
    part="process",
)
def test_a_trainer_that_dies_at_once_is_told_with_its_last_lines(deployed) -> None:
    seen = deployed.ask("restart", "--from-scratch", "--set=data.train=examples/README.md", code=None)
    if "error" not in seen:  # it lived long enough for a first state
        seen = deployed.wait_for(lambda s: s["verdict"] == "crashed", "the crash", 60)
    assert "README.md" in json.dumps(seen)
    assert deployed.status()["verdict"] == "crashed"


def test_a_deploy_is_one_round_trip_changed_or_not(deployed) -> None:
    again = deployed.ask("deploy")
    assert (again["outcome"], again["round_trips"]) == ("unchanged", 1)
    assert "unchanged" in deployed.invoke("deploy")
    (deployed.folder / "remote_payload" / "examples" / "note.txt").write_text(f"{random.random()}")
    changed = deployed.ask("deploy")
    assert (changed["outcome"], changed["round_trips"]) == ("deployed", 1)


def test_a_box_that_is_ready_passes_every_check_of_doctor(deployed) -> None:
    seen = deployed.ask("doctor")
    states = {check["name"]: check["state"] for check in seen["checks"]}
    assert seen["counts"]["failed"] == seen["counts"]["warning"] == 0, seen["checks"]
    assert states["release"] == states["recipe"] == states["model"] == states["tracing"] == "ok"


@fault(
    "ten cuts of a deploy at random moments",
    promised="a whole release after each; no debris in the end",
    seen="exit 7; every file of the current release by its hash, `whole `; no `.incoming`",
    part="way",
)
def test_ten_cuts_in_a_deploy_leave_a_whole_release_and_no_debris(deployed) -> None:
    """Each cut comes at another moment; `current` names a release that verifies before and after."""
    from controller import sandbox

    chance = random.Random(7)
    big = deployed.folder / "remote_payload" / "examples" / "big.bin"
    whole, cuts = 2.0, 0  # seconds: of the last one that came to its end
    for _ in range(10):
        big.write_bytes(chance.randbytes(8 << 20))
        began = time.monotonic()
        process = deployed.start("deploy", stdout=-3, stderr=-3, stdin=-3)
        ends = began + chance.uniform(0.2, whole)
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.01)
        cut_connections(sandbox, deployed)
        if process.wait(60) == 7:
            cuts += 1
        else:
            whole = time.monotonic() - began
        assert deployed.sh(VERIFY).startswith("whole ")
    assert cuts >= 3, "the cuts came too late to mean anything"
    deployed.wait_for(lambda s: s["snapshot"]["lock"] is None, "the last cut deploy lets go of the box")
    deployed.invoke("deploy")
    assert ".incoming" not in deployed.sh("ls -a /opt/pctrun/releases")


def cut_connections(sandbox, project) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCTRUN_SANDBOX", str(project.sandbox))
        sandbox.cut_connections()


VERIFY = """cd /opt/pctrun/current/ && python3 - <<'END'
import hashlib, json, pathlib
manifest = json.load(open("manifest.json"))
rows = manifest["files"] if isinstance(manifest, dict) else manifest
for row in rows:
    assert hashlib.sha256(pathlib.Path(row["path"]).read_bytes()).hexdigest() == row["sha256"], row
print("whole", pathlib.Path(".").resolve().name)
END"""
