"""What a checkpoint restores, what it refuses, and that half a one is none."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import checkpoint as bench_checkpoint
from trainer import checkpoint
from trainer.config import config_hash, load_recipe
from trainer.drafter import Drafter, initialise
from trainer.errors import Refusal
from trainer.geometry import resolve
from trainer.optimizer import Optimizer, learning_rate

CONFIG = {"config_hash": "aa", "data_sha256": "bb"}


@pytest.fixture
def make(tiny_release):
    recipe = load_recipe("tiny", tiny_release)

    def trained(seed: int, steps: int) -> tuple[Drafter, Optimizer]:
        drafter = Drafter(resolve(recipe))
        initialise(drafter, seed)
        storage = drafter.attach(torch.device("cpu"), torch.float32)
        optimizer = Optimizer(drafter, storage, recipe.train)
        for step in range(steps):
            take_step(drafter, optimizer, step)
        return drafter, optimizer

    return trained


def take_step(drafter: Drafter, optimizer: Optimizer, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in drafter.parameters():
        parameter.grad.copy_(torch.randn(parameter.shape, generator=draw))
    optimizer.step(step, denominator=3.0)


def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path, make):
    drafter, optimizer = make(seed=0, steps=3)
    path = checkpoint.save(tmp_path, 3, drafter, optimizer, CONFIG, keep=2)
    assert path.name == "step-000003"
    restored, restored_optimizer = make(seed=1, steps=1)
    assert checkpoint.check(path, CONFIG) == 3
    checkpoint.load(path, 3, restored, restored_optimizer)
    for parts in ((drafter, optimizer), (restored, restored_optimizer)):
        for step in (3, 4):
            take_step(*parts, step)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(restored.state_dict()[name], tensor), name


def test_only_the_newest_are_kept_and_debris_is_no_checkpoint(tmp_path, make):
    drafter, optimizer = make(seed=0, steps=1)
    (tmp_path / ".incoming-step-000002").mkdir(parents=True)  # a writer that was killed
    (tmp_path / ".incoming-step-000002" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-000009").mkdir()  # without complete.json
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, drafter, optimizer, CONFIG, keep=2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-000002", "step-000003"]
    assert not list(tmp_path.glob(".incoming*"))


def test_the_best_is_kept_beside_the_newest(tmp_path, make):
    drafter, optimizer = make(seed=0, steps=1)
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, drafter, optimizer, CONFIG, keep=2, best=2 if step > 2 else None)
    assert [path.name for path in checkpoint.complete(tmp_path)] == [
        "step-000002",
        "step-000004",
        "step-000005",
    ]


def test_another_configuration_other_data_and_damage_are_refused_in_one_line(tmp_path, make):
    drafter, optimizer = make(seed=0, steps=1)
    path = checkpoint.save(tmp_path, 1, drafter, optimizer, CONFIG, keep=2)
    for change in ({"config_hash": "zz"}, {"data_sha256": "zz"}):
        with pytest.raises(Refusal, match=rf"was made with {next(iter(change))} .., this run has zz"):
            checkpoint.check(path, CONFIG | change)
    with pytest.raises(Refusal, match=r"is not whole"):
        checkpoint.check(tmp_path / "step-000002", CONFIG)
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    (broken / "optimizer.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(Refusal, match=r"is damaged .*: resume from another") as refusal:
        checkpoint.load(broken, 1, drafter, optimizer)
    assert "\n" not in str(refusal.value)


def cut_in_half(name):
    def cut(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[: (folder / name).stat().st_size // 2])

    return cut


def with_value(name, key, value):
    def change(folder):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {key: value}))

    return change


@pytest.mark.parametrize(
    ("spoil_it", "reason"),
    [
        (cut_in_half("model.safetensors"), "damaged (model.safetensors: "),
        (cut_in_half("optimizer.safetensors"), "damaged (optimizer.safetensors: "),
        (lambda folder: (folder / "config.json").unlink(), "not whole (config.json: No such file"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no mapping"),
        (with_value("config.json", "epoch_starts", None), "not whole (its record is none: "),
        (with_value("config.json", "epoch_starts", [0, 5, 5]), "epoch_starts do not rise from row 0"),
        (with_value("config.json", "metrics", "x"), "metrics are no mapping"),
        (with_value("complete.json", "step", 3), "complete.json names step 3"),
        (with_value("complete.json", "files", 3), "not whole (its record is none: "),
    ],
)
def test_a_damaged_checkpoint_without_hashes_is_passed_over_for_the_one_before(
    tmp_path, make, spoil_it, reason
):
    config = CONFIG | {"epoch_starts": [0], "metrics": {}}
    for step in (2, 4):  # as killed in the second after it was written: nothing is sealed
        last = checkpoint.save(tmp_path, step, *make(seed=0, steps=1), config, keep=2)
    assert checkpoint.newest_whole(last, config) == (last, 4, [])
    spoil_it(last)
    place, step, (passed_over,) = checkpoint.newest_whole(last, config)
    assert (place.name, step) == ("step-000002", 2)
    assert passed_over.startswith("step-000004 is ") and reason in passed_over and "\n" not in passed_over


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("train.steps=400", ""),
        ("train.lr=1e-4", ""),
        ("train.eval_every=7", ""),
        ("log.tensorboard=true", ""),
        ("topology.split=2:1", ""),
        ("train.steps=9", "has 10 steps, this run ends after 9: raise train.steps"),
        ("train.seed=1", "was made with train.seed 0, this run has 1"),
        ("train.rows_per_step=2", "was made with train.rows_per_step 1, this run has 2"),
        ("topology.drafters=2", "was made with train.rows_per_step 1, this run has 2"),
        ("drafter.layers=3", "was made with drafter.layers 2, this run has 3"),
        ("data.budget=128", "was made with data.budget 256, this run has 128"),
    ],
)
def test_what_only_the_steps_to_come_follow_may_change(tmp_path, make, tiny_release, override, refused):
    def config(*overrides: str) -> dict[str, Any]:
        recipe = load_recipe("tiny", tiny_release, [*overrides, "drafter.layer_types=null"])
        return {"config_hash": config_hash(recipe), "data_sha256": "bb", "recipe": asdict(recipe)}

    path = checkpoint.save(tmp_path, 10, *make(seed=0, steps=1), config(), keep=2)
    if refused:
        with pytest.raises(Refusal, match=refused):
            checkpoint.check(path, config(override))
    else:
        assert checkpoint.check(path, config(override)) == 10
    with pytest.raises(Refusal, match="was made with data_sha256 bb, this run has cc"):
        checkpoint.check(path, config("train.steps=400") | {"data_sha256": "cc"})


def test_the_learning_rate_warms_up_and_falls_to_zero_on_a_cosine(tiny_release):
    train = load_recipe(
        "tiny", tiny_release, ["train.steps=100", "train.warmup_share=0.1", "train.lr=1.0"]
    ).train
    rates = [learning_rate(train, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_gradients_are_clipped_by_their_joint_norm(make):
    drafter, optimizer = make(seed=0, steps=0)
    for parameter in drafter.parameters():
        parameter.grad.fill_(6.0)
    count = sum(parameter.numel() for parameter in drafter.parameters())
    _, norm = optimizer.step(0, denominator=2.0)
    assert norm == pytest.approx(3.0 * count**0.5, rel=1e-4)
    moment = optimizer.tensors()["exp_avg.fc.weight"]
    assert torch.allclose(moment, torch.full_like(moment, 0.1 * count**-0.5), rtol=1e-3)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 128
    path.write_bytes(data)


def test_a_sealed_checkpoint_shows_a_bit_that_flips_and_a_byte_that_is_gone(tmp_path, make):
    drafter, optimizer = make(seed=0, steps=1)
    path = checkpoint.save(tmp_path, 1, drafter, optimizer, CONFIG, keep=2)
    sealer = checkpoint.Sealer()
    sealer.seal(path)
    sealer.wait()
    assert checkpoint.check(path, CONFIG) == 1
    assert sorted(each.name for each in path.iterdir()) == [
        "complete.json",
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    for name in ("model.safetensors", "optimizer.safetensors", "config.json"):
        whole = (path / name).read_bytes()
        flip(path / name)
        with pytest.raises(checkpoint.Damaged, match=rf"is damaged \({name}: its checksum differs\)"):
            checkpoint.check(path, CONFIG)
        (path / name).write_bytes(whole[:-1])
        with pytest.raises(checkpoint.Damaged, match=rf"{name} has [\d,]+ of [\d,]+ bytes"):
            checkpoint.check(path, CONFIG)
        (path / name).unlink()
        with pytest.raises(checkpoint.Damaged, match=rf"{name}: No such file"):
            checkpoint.check(path, CONFIG)
        (path / name).write_bytes(whole)
    assert checkpoint.check(path, CONFIG) == 1


def test_a_checkpoint_that_goes_while_it_is_sealed_is_no_failure(tmp_path, make):
    path = checkpoint.save(tmp_path / "own", 1, *make(seed=0, steps=1), CONFIG, keep=2)
    shutil.rmtree(path)
    checkpoint.seal(path)
    assert not list((tmp_path / "own").iterdir())


def test_the_newest_whole_one_is_looked_for_beside_and_in_what_the_run_resumed(tmp_path, make):
    trained = make(seed=0, steps=1)
    first, second = tmp_path / "r-0001/checkpoints", tmp_path / "r-0002/checkpoints"
    places = [checkpoint.save(folder, n, *trained, CONFIG, keep=9) for folder, n in ((first, 3), (first, 6))]
    order = {"resume_from": {"path": str(places[-1])}}
    places += [checkpoint.save(second, n, *trained, CONFIG, keep=9) for n in (9, 12)]
    (second.parent / "run.json").write_text(json.dumps(order))
    for path in places:
        checkpoint.seal(path)
    for left in range(len(places), 0, -1):
        found, step, passed_over = checkpoint.newest_whole(places[-1], CONFIG)
        assert (found, step, len(passed_over)) == (places[left - 1], 3 * left, len(places) - left)
        flip(found / "model.safetensors")
    with pytest.raises(Refusal, match=r"no checkpoint of r-0002 is whole, step-000012 is damaged .*scratch"):
        checkpoint.newest_whole(places[-1], CONFIG)
    with pytest.raises(Refusal, match="was made with config_hash"):  # that is no damage to be passed over
        checkpoint.newest_whole(
            checkpoint.save(first, 20, *trained, CONFIG, keep=9), CONFIG | {"config_hash": "zz"}
        )


def test_weights_that_are_no_numbers_are_named(tmp_path, make):
    drafter, optimizer = make(seed=0, steps=1)
    with torch.no_grad():
        drafter.norm.weight[2] = float("inf")
    path = checkpoint.save(tmp_path, 1, drafter, optimizer, CONFIG, keep=2)
    with pytest.raises(Refusal, match=r"norm.weight has NaN or infinite values: resume from another"):
        checkpoint.load(path, 1, drafter, optimizer)


def test_the_bench_tells_what_a_checkpoint_costs(tiny_release, tiny_target, tmp_path, capsys):
    recipe = str(tiny_release / "recipes/tiny.yaml")
    assert (
        bench_checkpoint.main(
            ["--model", str(tiny_target), "--recipe", recipe, "--folder", str(tmp_path), "--times", "2"]
        )
        == 0
    )
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[1:]] == ["seconds", "save", "seal", "check"]
