"""Start, stop and everything that may die in between, with real processes that are really killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent import procs
from tests.faults.table import fault


def role(box, run, name):
    found = box.call("snapshot", run=run).result["run"]["processes"]
    return next((each["pid"] for each in found if each["role"] == name), None)


def step(box, run):
    try:
        return box.file(run, "state.json")["step"]
    except FileNotFoundError:
        return 0


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def removed(folder):
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_start_returns_with_the_first_state_and_records_the_run(ready):
    result = ready.start().result
    assert result["run"] == "r-0001" and result["resume_from"] is None
    assert result["phase"] in ("starting", "training") and 0 < result["first_state_after_s"] < 60
    assert result["cache"]["choice"] == "new" and Path(result["cache"]["dir"], "triton").is_dir()
    record = ready.file("r-0001", "run.json")
    assert record["release"] == ready.current() and record["operator"] == {"user": "ana", "host": "desk"}
    assert record["grace_s"] == 120.0 and len(record["config_hash"]) == 16
    run = ready.call("snapshot").result["run"]
    assert [each["role"] for each in run["processes"]] == ["supervisor", "trainer"] and run["tmux"] is True


def test_the_trainer_sees_only_the_environment_of_its_record(ready):
    ready.environment["SSH_CONNECTION"] = "10.0.0.1"
    ready.start()
    record = ready.file("r-0001", "run.json")
    seen = json.loads(
        (ready.run_dir("r-0001") / "train.log").read_text().partition("environment ")[2].splitlines()[0]
    )
    assert set(seen) - {"LC_CTYPE"} == set(record["env"]) and "SSH_CONNECTION" not in seen
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        assert record["env"][name] == f"{record['cache']['dir']}/{folder}"


def test_the_tmux_server_is_not_in_the_runs_scope(ready):
    ready.start()
    commands = [proc.argv[0] for proc in ready.scope("r-0001")]
    assert len(commands) == 2 and not any("tmux" in command for command in commands)


def test_stop_saves_a_checkpoint_and_loses_no_step(ready):
    ready.start()
    ready.wait_for(lambda: step(ready, "r-0001") > 3, "some steps")
    result = ready.call("stop", reason="lunch").result
    assert result["outcome"] == "stopped" and result["run"] == "r-0001" and result["lost_steps"] == 0
    assert result["checkpoint"]["step"] == result["step"] > 3
    assert result["killed"] == result["survivors"] == result["gpus"] == []
    end = ready.file("r-0001", "exit.json")
    assert (end["reason"], end["code"], end["signal"]) == ("stopped", 0, None)
    assert ready.file("r-0001", "stop.json")["reason"] == "lunch"
    assert ready.scope("r-0001") == []


def test_a_second_stop_succeeds_and_says_there_is_nothing_to_stop(ready):
    assert ready.call("stop").result["outcome"] == "nothing-to-stop"
    ready.start()
    first = ready.call("stop").result
    second = ready.call("stop").result
    assert second["outcome"] == "nothing-to-stop" and second["run"] == "r-0001"
    assert second["checkpoint"] == first["checkpoint"]
    assert ready.call("stop", run="r-0009").error["kind"] == "no-run"


def test_start_refuses_while_a_run_is_alive(ready):
    ready.start()
    error = ready.start().error
    assert error["kind"] == "run-alive" and "r-0001 is alive" in error["message"]


def test_a_stopped_run_is_resumed_at_its_checkpoint(ready):
    ready.start()
    ready.wait_for(lambda: step(ready, "r-0001") > 3, "some steps")
    saved = ready.call("stop").result["checkpoint"]
    result = ready.start().result
    assert result["resume_from"] == {"run": "r-0001", **saved}
    ready.call("stop")
    assert ready.start(resume="none").result["resume_from"] is None


def test_resume_ignores_other_configurations_and_half_written_checkpoints(ready):
    ready.start(recipe={"save_every": 5})
    ready.wait_for(lambda: step(ready, "r-0001") > 6, "a checkpoint")
    ready.call("stop")
    newest = max((ready.run_dir("r-0001") / "checkpoints").iterdir())
    (newest / "complete.json").write_text('{"st')
    older = sorted((ready.run_dir("r-0001") / "checkpoints").iterdir())[-2]
    other = ready.start(recipe={"save_every": 5, "steps": 99})
    assert other.result["resume_from"] is None
    assert "(invoke restart --from r-0001 goes on with it)" in other.notes[0]["text"]
    ready.call("stop")
    assert ready.start(recipe={"save_every": 5}).result["resume_from"]["path"] == str(older)


def test_a_run_that_died_before_its_first_checkpoint_hands_on_what_it_resumed(ready):
    ready.start(recipe={"seed": 1})
    ready.wait_for(lambda: step(ready, "r-0001") > 3, "some steps")
    saved = ready.call("stop").result["checkpoint"]
    assert ready.start("die", recipe={"seed": 1}).error["kind"] == "died"
    assert ready.start(recipe={"seed": 1}).result["resume_from"] == {"run": "r-0001", **saved}


def test_a_finished_training_is_not_resumed(ready):
    ready.start(recipe={"steps": 3, "step_s": 0.001})
    ready.wait_for(lambda: (ready.run_dir("r-0001") / "exit.json").exists(), "the end")
    assert ready.file("r-0001", "exit.json")["reason"] == "finished"
    assert ready.start(recipe={"steps": 3, "step_s": 0.001}).result["resume_from"] is None


def test_a_trainer_that_dies_at_once_is_told_with_its_last_lines(ready):
    error = ready.start("die").error
    assert error["kind"] == "died" and error["run"] == "r-0001"
    assert error["log"][-1] == "ValueError: the stand-in dies as it was told"
    end = ready.file("r-0001", "exit.json")
    assert (end["reason"], end["code"], end["detail"]) == ("crashed", 1, error["log"][-1])
    run = ready.call("snapshot").result["run"]
    assert run["log"]["traceback"][0] == "Traceback (most recent call last):"
    assert run["log"]["traceback"][-1] == error["log"][-1]
    refused = ready.start("refuse").error
    assert refused["log"][-1] == "recipes/tiny.yaml:1: no such device"
    assert ready.file("r-0002", "exit.json")["code"] == 2


def test_a_trainer_without_a_first_state_is_left_alone_and_can_be_stopped(ready):
    result = ready.start("silent", first_state_s=1).result
    assert result["phase"] is None and result["first_state_after_s"] is None
    stopped = ready.call("stop").result
    assert stopped["outcome"] == "stopped" and stopped["checkpoint"] is None and stopped["killed"] == []
    end = ready.file("r-0001", "exit.json")
    assert (end["reason"], end["signal"], end["code"]) == ("stopped", "SIGTERM", 143)


def test_a_killed_trainer_is_written_down_with_its_signal_and_resumed(ready):
    ready.start(recipe={"save_every": 5})
    ready.wait_for(lambda: step(ready, "r-0001") > 6, "a checkpoint")
    os.kill(role(ready, "r-0001", "trainer"), signal.SIGKILL)
    ready.wait_for(lambda: (ready.run_dir("r-0001") / "exit.json").exists(), "exit.json")
    end = ready.file("r-0001", "exit.json")
    assert (end["reason"], end["signal"], end["code"]) == ("crashed", "SIGKILL", 137)
    assert ready.start(recipe={"save_every": 5}).result["resume_from"]["step"] % 5 == 0


def test_a_killed_tmux_server_changes_nothing_for_the_run(ready):
    ready.start()
    ready.clean_up_tmux()
    at = step(ready, "r-0001")
    ready.wait_for(lambda: step(ready, "r-0001") > at + 5, "it goes on")
    run = ready.call("snapshot").result["run"]
    assert [each["role"] for each in run["processes"]] == ["supervisor", "trainer"] and run["tmux"] is False
    assert ready.call("stop").result["outcome"] == "stopped"
    assert ready.file("r-0001", "exit.json")["reason"] == "stopped"


def test_a_killed_supervisor_leaves_the_trainer_and_its_log_and_stop_still_works(ready):
    ready.start()
    ready.wait_for(lambda: step(ready, "r-0001") > 1, "a step")
    os.kill(role(ready, "r-0001", "supervisor"), signal.SIGKILL)
    log = ready.run_dir("r-0001") / "train.log"
    size = log.stat().st_size
    ready.wait_for(lambda: log.stat().st_size > size, "the log grows")
    assert role(ready, "r-0001", "trainer") and not role(ready, "r-0001", "supervisor")
    result = ready.call("stop").result
    assert result["outcome"] == "stopped" and result["lost_steps"] == 0
    end = ready.file("r-0001", "exit.json")
    assert end["reason"] == "stopped" and end["code"] is None


@fault(
    "the trainer ignores SIGTERM",
    promised="`abort` waits its grace, then ends the run's own processes; says how many steps that cost",
    seen="`killed`, `lost_steps`",
    part="process",
)
def test_a_trainer_that_ignores_term_is_killed_after_its_grace(ready):
    ready.start("ignore-term")
    ready.wait_for(lambda: step(ready, "r-0001") > 3, "some steps")
    began = time.monotonic()
    answer = ready.call("stop", grace_s=1)
    assert answer.result["outcome"] == "killed" and 1 <= time.monotonic() - began < 50
    assert len(answer.result["killed"]) == 1
    assert answer.result["lost_steps"] == answer.result["step"] > 3
    assert any("of 1 s" in note["text"] for note in answer.notes)
    end = ready.file("r-0001", "exit.json")
    assert (end["reason"], end["signal"]) == ("stopped", "SIGKILL")


@fault(
    "the trainer is suspended by SIGSTOP when it is to stop",
    promised="it is woken, saves, and ends",
    seen="`stopped`, no step lost",
    part="process",
)
def test_a_stopped_process_is_continued_so_that_it_can_save(ready):
    ready.start()
    ready.wait_for(lambda: step(ready, "r-0001") > 1, "a step")
    os.kill(role(ready, "r-0001", "trainer"), signal.SIGSTOP)
    result = ready.call("stop", grace_s=20).result
    assert result["outcome"] == "stopped" and result["lost_steps"] == 0


@fault(
    "a child of the trainer ignores every signal, in a session of its own",
    promised="`abort` finds it by the run's marker and ends it, and nothing else",
    seen="`stopped`, the child alone killed",
    part="process",
)
@pytest.mark.parametrize("behave", ["escape", "fork"])
def test_a_child_that_outlives_the_trainer_is_killed_with_the_run(ready, behave):
    ready.start(behave)
    child = ready.wait_for(lambda: role(ready, "r-0001", "worker"), "the child")
    result = ready.call("stop").result
    assert result["outcome"] == "stopped" and [each["pid"] for each in result["killed"]] == [child]
    assert not lives(child) and ready.scope("r-0001") == []


@fault(
    "a dead trainer left a process behind",
    promised="a start is refused while it lives; `restart` ends it first",
    seen="`is left`",
    part="process",
)
def test_what_a_dead_trainer_left_is_not_taken_for_the_trainer_and_blocks_a_start(ready):
    ready.start("fork")
    ready.wait_for(lambda: role(ready, "r-0001", "worker"), "the child")
    os.kill(role(ready, "r-0001", "trainer"), signal.SIGKILL)
    ready.wait_for(lambda: (ready.run_dir("r-0001") / "exit.json").exists(), "exit.json")
    ready.wait_for(lambda: len(ready.scope("r-0001")) == 1, "only the child is left")
    assert role(ready, "r-0001", "trainer") is None and role(ready, "r-0001", "worker")
    assert "is left" in ready.start().error["message"]
    result = ready.start(verb="restart").result
    assert len(result["stop"]["killed"]) == 1 and result["start"]["run"] == "r-0002"
    assert ready.file("r-0001", "exit.json")["reason"] == "crashed"


@fault(
    "another's Python process, even one with the same run's name elsewhere",
    promised="never touched",
    seen="alive after `restart` and `stop`",
    part="process",
)
def test_a_foreign_python_survives_a_restart_even_with_the_same_run_id_elsewhere(ready):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", "trainer", "--run-dir"]
    foreign = subprocess.Popen(sleep)
    marked = {"PCTRUN_RUN_ID": "r-0001", "PCTRUN_RUN_DIR": "/elsewhere/runs/r-0001"}
    elsewhere = subprocess.Popen(sleep, env={**os.environ, **marked})
    try:
        ready.start()
        assert ready.start(verb="restart").result["start"]["run"] == "r-0002"
        assert ready.call("stop").result["killed"] == []
        assert foreign.poll() is None and elsewhere.poll() is None
        assert ready.call("snapshot").result["stale"] == []
    finally:
        for process in (foreign, elsewhere):
            process.kill()
            process.wait()


def test_a_restart_that_could_not_start_does_not_stop_the_run(ready):
    ready.start()
    assert ready.call("restart", recipe="tyni", python=ready.python).error["kind"] == "no-recipe"
    assert (
        ready.start(verb="restart", recipe={"steps": 0}).error["message"].startswith("recipes/tiny.yaml:1:")
    )
    assert role(ready, "r-0001", "trainer")


@pytest.mark.parametrize(
    ("recipe", "kind", "words"),
    [
        ({"model": "/no/model"}, "no-model", "/no/model"),
        ({"corpus": {"train": "/no/data.jsonl"}}, "no-data", "data.train /no/data.jsonl is not in"),
        ({"corpus": {"train": "manifest.json", "heldout": "none.jsonl"}}, "no-data", "data.heldout none"),
        ({"checkpoint_bytes": 10**15}, "disk", "two checkpoints need 1862645.1 GiB"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_made(ready, recipe, kind, words):
    error = ready.start(recipe=recipe).error
    assert error["kind"] == kind and words in error["message"]
    assert not ready.run_dir("r-0001").exists()


def test_a_start_without_release_or_interpreter_is_refused(box):
    assert box.start().error["kind"] == "no-release"
    box.deploy()
    assert box.call("start", recipe="tiny", python="/no/python").error["kind"] == "no-python"
    assert box.start(resume="r-0007").error["kind"] == "no-run"


def test_a_stop_goes_on_when_its_reader_is_gone(ready):
    ready.start("ignore-term")
    agent = ready.begin("stop", {"grace_s": 1})
    ready.next_frame(agent)
    agent.stdout.close()
    agent.wait(60)
    assert ready.scope("r-0001") == [] and ready.file("r-0001", "exit.json")["reason"] == "stopped"
    agent.stdin.close()
    agent.stderr.close()


def test_a_fresh_cache_starts_empty_and_the_old_one_goes_once_the_run_is_up(ready):
    legacy = Path(ready.environment["TMPDIR"]) / "torchinductor_root"
    legacy.mkdir()
    folder = Path(ready.start().result["cache"]["dir"])
    (folder / "triton" / "kernel").write_text("compiled")
    ready.call("stop")
    kept = ready.start(verb="restart").result["start"]["cache"]
    assert kept["choice"] == "kept" and (folder / "triton" / "kernel").exists()
    assert kept["legacy"] == [{"path": str(legacy), "deleted": False, "used_by": []}] and legacy.exists()
    died = ready.start("die", verb="restart", fresh_cache=True)
    assert died.error["kind"] == "died" and died.error["stop"]["outcome"] == "stopped"
    assert len(list(folder.parent.glob("*.old-*"))) == 1
    fresh = ready.start(fresh_cache=True).result["cache"]
    assert fresh["choice"] == "fresh" and not list((folder / "triton").iterdir())
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert fresh["legacy"][0]["deleted"] != bool(fresh["legacy"][0]["used_by"])


@fault(
    "no tmux in the container",
    promised="the run starts, only without a window",
    seen="a run id, and a note",
    part="place",
)
def test_without_tmux_the_run_starts_all_the_same(ready):
    bare = ready.base / "bin"
    bare.mkdir()
    ready.environment["PATH"] = str(bare)
    answer = ready.start()
    assert answer.result["run"] == "r-0001"
    assert any("tmux is not installed" in note["text"] for note in answer.notes)
    assert ready.call("stop").result["outcome"] == "stopped"


def test_a_run_whose_folder_was_deleted_is_seen_and_can_be_stopped(ready):
    ready.start()
    ready.call("stop")
    ready.start(resume="none")
    pid = role(ready, "r-0002", "trainer")
    os.kill(pid, signal.SIGSTOP)  # or it would notice, and end by itself
    ready.wait_for(lambda: procs.look(pid).state == "T", "it stands still")
    ready.wait_for(lambda: removed(ready.run_dir("r-0002")), "the supervisor writes nothing in between")
    run = ready.call("snapshot").result["run"]
    assert (
        run["id"] == "r-0002" and run["record"] is None and pid in [each["pid"] for each in run["processes"]]
    )
    assert ready.start().error["kind"] == "run-alive"
    result = ready.call("stop", grace_s=0.5).result
    assert (
        result["run"] == "r-0002" and result["outcome"] in ("stopped", "killed") and not result["survivors"]
    )
    assert not lives(pid) and not ready.scope("r-0002")


@fault(
    "stop.json cannot be written",
    promised="a stop works all the same",
    seen="`stopped`, the trainer is gone",
    part="place",
)
def test_a_full_disk_does_not_keep_a_run_from_being_stopped(ready):
    ready.start()
    pid = role(ready, "r-0001", "trainer")
    (ready.run_dir("r-0001") / "stop.json").mkdir()  # cannot be replaced by a file, for root neither
    assert ready.call("stop").result["outcome"] == "stopped"
    assert not lives(pid)
