"""The estimate of a drafter's memory against arithmetic done by hand, and what a refusal advises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.trainer.drafter_cases import GEOMETRY, replica
from trainer import memory
from trainer.config import DataConfig, Recipe, TargetConfig, TrainConfig
from trainer.errors import Refusal
from trainer.memory import GIB

BF16, CARD = torch.bfloat16, torch.device("cuda:3")
RECIPE = Recipe(
    name="full",
    target=TargetConfig(model=""),
    data=DataConfig("", "", budget=49152),
    train=TrainConfig(steps=1),
)
QWEN_27B = dataclasses.replace(
    GEOMETRY,
    hidden_size=5120,
    vocab_size=248320,
    target_layer_ids=(1, 16, 31, 46, 61),
    block_size=16,
    layers=5,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=17408,
    layer_types=("full_attention",) * 5,
)


def test_the_27b_drafter_needs_what_its_tensors_add_up_to():
    need = memory.drafter_need(RECIPE, QWEN_27B, BF16)
    assert sum(need[n] for n in ("fp32 weights", "Adam moments")) == pytest.approx(20.8e9, rel=0.01)
    assert need["embedding and head"] == pytest.approx(2 * 2.54e9, rel=0.01)
    assert need["features"] == 2 * 49152 * 25600 * 2
    assert need["logits of a chunk"] > 2 * 128 * 15 * 248320 * 2
    assert 45 < sum(need.values()) / GIB < 60


def test_checkpointing_and_fewer_anchors_need_less():
    def layers(**train: object) -> int:
        changed = dataclasses.replace(RECIPE, train=TrainConfig(steps=1, **train))
        return memory.drafter_need(changed, QWEN_27B, BF16)["layers"]

    assert layers(activation_checkpointing=True) < 0.35 * layers()
    assert layers(anchors=256) < 0.6 * layers()


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (48, "set train.activation_checkpointing: true"),
        (45, "set train.activation_checkpointing: true and train.anchors: "),
        (30, "lower data.budget, name fewer drafters on cuda:3 in topology, or free it"),
    ],
)
def test_a_card_with_too_little_is_refused_with_the_figures_and_the_smallest_mend(free, advice):
    with pytest.raises(Refusal) as refused:
        memory.fit(RECIPE, QWEN_27B, CARD, BF16, 1, free * GIB)
    line = str(refused.value)
    assert line.startswith(f"cuda:3 has {free}.0 GiB free, 1 drafter(s) need 52.4")
    assert "Adam moments 12.9" in line
    assert line.split(": ", 1)[1].startswith(advice)


def test_a_card_with_enough_passes_and_two_drafters_share_the_head():
    one, two = (memory._total(RECIPE, QWEN_27B, CARD, BF16, n) for n in (1, 2))
    need = memory.drafter_need(RECIPE, QWEN_27B, BF16)
    assert two - one == sum(need.values()) - need["embedding and head"]
    memory.fit(RECIPE, QWEN_27B, CARD, BF16, 2, two)
    with pytest.raises(Refusal):
        memory.fit(RECIPE, QWEN_27B, CARD, BF16, 2, two - 1)


def test_resident_tensors_are_those_of_a_real_replica():
    made = replica(dtype=BF16)
    need = memory.drafter_need(made.recipe, GEOMETRY, BF16)
    made.optimizer.step(0, 1.0)
    slack = 64 * 4 * 30  # what alignment adds to a small drafter
    for name, tensors in {
        "fp32 weights": [made.storage.weights],
        "gradients": [made.storage.gradients],
        "compute weights": [made.storage.compute],
        "Adam moments": list(made.optimizer.tensors().values()),
        "embedding and head": [made.head.embed_tokens, made.head.lm_head],
    }.items():
        assert need[name] <= sum(t.nbytes for t in tensors) <= need[name] + slack, name


def test_on_a_cpu_what_no_machine_has_is_refused_and_the_reserve_is_no_part_of_it():
    small = dataclasses.replace(RECIPE, data=DataConfig("", "", budget=256), train=TrainConfig(1, anchors=8))
    cpu = torch.device("cpu")
    assert memory.check_drafters(small, GEOMETRY, [cpu] * 2, torch.float32)["cpu"] < 0.1
    for most in (DataConfig("", "", budget=2**31 - 1), TrainConfig(steps=1, anchors=2**31 - 1)):
        key = "data" if isinstance(most, DataConfig) else "train"
        absurd = dataclasses.replace(RECIPE, **{key: most})
        with pytest.raises(Refusal, match=r"^cpu has .* GiB free, 1 drafter\(s\) need "):
            memory.check_drafters(absurd, QWEN_27B, [cpu], torch.float32)
