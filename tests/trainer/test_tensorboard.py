"""What TensorBoard itself reads of a run: every step once, also after another attempt and a full disk."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.config import config_hash, load_recipe

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"


def read(folder: Path):
    """TensorBoard's own reader, with the rule by which it hides what a later attempt does again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def steps(found, tag: str) -> list[int]:
    return [each.step for each in found.Scalars(tag)]


def test_a_run_and_its_second_attempt_are_one_curve(tmp_path, tiny_release, capsys):
    run = tmp_path / "run"
    run.mkdir()
    wishes = {"checkpoint_every": 2, "eval_every": 2, "keep_checkpoints": 3, "steps": 6}
    overrides = {"log.tensorboard": True, **{f"train.{key}": value for key, value in wishes.items()}}
    order = {"release_dir": str(tiny_release), "recipe": "tiny", "overrides": overrides, "resume_from": None}
    (run / "run.json").write_text(json.dumps(order))
    assert main(["--run-dir", str(run)]) == 0
    assert main(["--run-dir", str(run), "--resume", str(run / "checkpoints" / "step-000004")]) == 0
    capsys.readouterr()

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "tau" in line] == [2, 4]
    assert len(list((run / "tensorboard").iterdir())) == 2
    found = read(run / "tensorboard")
    for tag in ("train/loss", "train/lr", "train/grad_norm", "accuracy/slot_01", "speed/step_s"):
        assert steps(found, tag) == [1, 2, 3, 4, 5, 6], tag
    assert steps(found, "eval/tau") == [2, 4]
    assert any(tag.startswith("busy/drafter") for tag in found.Tags()["scalars"])
    for event, line in zip(found.Scalars("train/loss"), lines, strict=True):
        assert math.isclose(event.value, line["loss"], rel_tol=1e-6)
        assert math.isclose(event.wall_time, line["time"], abs_tol=1e-3)
    for event, line in zip(found.Scalars("speed/tokens_per_s"), lines, strict=True):
        assert math.isclose(event.value, line["tokens"] / line["step_s"], rel_tol=1e-6)


FULL = """
import pathlib, resource, sys
from trainer.tensorboard import Events
told = []
events = Events(pathlib.Path(sys.argv[1]), 0, told.append)
[file] = (pathlib.Path(sys.argv[1]) / "tensorboard").iterdir()
def step(number):
    events.add({"step": number, "time": 1e9 + number, "loss": 1 / number, "lr": 1e-3})
step(1)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 7, limits[1]))  # in the middle of a record
for number in range(2, 6):
    step(number)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
step(6)
events.add({"step": 7, "time": "never"})
events.add({"step": 7, "time": 1e9 + 7, "loss": float("nan")})
events.close()
print("\\n".join(told))
"""


def test_a_full_disk_costs_nothing_once_there_is_room(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=PAYLOAD, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert told[0] == "TensorBoard's file cannot be written (File too large): training goes on without it"
    assert len(told) == 2 and "TypeError" in told[1]
    assert steps(read(tmp_path / "tensorboard"), "train/lr") == [1, 2, 3, 4, 5, 6]
    assert steps(read(tmp_path / "tensorboard"), "train/loss") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("program", ["trainer.describe", "trainer"])
def test_without_the_package_a_run_is_refused_in_one_line(tmp_path, tiny_release, program):
    broken = tmp_path / "site" / "tensorboard"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError(\"No module named 'tensorboard'\")\n")
    recipe = str(tiny_release / "recipes/tiny.yaml")
    words = {
        "trainer.describe": [recipe, "--overrides", '{"log.tensorboard": true}'],
        "trainer": ["--run-dir", str(tmp_path / "run"), "--recipe", recipe, "--set", "log.tensorboard=true"],
    }
    done = subprocess.run(
        [sys.executable, "-m", program, *words[program]],
        cwd=PAYLOAD,
        env={**os.environ, "PYTHONPATH": str(broken.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = json.loads(done.stdout)["error"] if program == "trainer.describe" else done.stderr.strip()
    assert done.returncode == 2 and "\n" not in said
    assert "log.tensorboard: the package tensorboard does not load here (No module named" in said
    assert said.endswith("or set log.tensorboard=false")


def test_it_is_outside_the_configuration(tiny_release):
    recipe = str(tiny_release / "recipes/tiny.yaml")
    plain, told = (load_recipe(recipe, tiny_release, {"log.tensorboard": wish}) for wish in (False, True))
    assert config_hash(plain) == config_hash(told)
