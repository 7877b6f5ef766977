"""Every recipe that travels is one a run would accept; the full-size ones make the published drafter."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from trainer import memory
from trainer.config import Recipe, load_recipe
from trainer.describe import describe
from trainer.geometry import resolve
from trainer.masks import FLEX_BLOCK
from trainer.topology import auto_split

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"
MODEL_27B = PAYLOAD / "bench/configs/qwen3.5-27b"
AT_27B = [f"target.model={MODEL_27B}"]
FULL_SIZE = ("qwen3.6-27b", "qwen3.6-27b-paper")


def full_size(name: str) -> Recipe:
    return load_recipe(name, PAYLOAD, AT_27B)


@pytest.mark.parametrize("name", sorted(path.stem for path in (PAYLOAD / "recipes").glob("*.yaml")))
def test_every_recipe_loads(name):
    assert describe(name, PAYLOAD, [])["ok"]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_full_size_recipes_make_the_published_geometry(name):
    answer = describe(name, PAYLOAD, AT_27B)
    assert answer["checkpoint_bytes"] == pytest.approx(20.8e9, rel=0.01)
    g = resolve(full_size(name))
    assert (g.hidden_size, g.vocab_size, g.num_target_layers) == (5120, 248320, 64)
    assert g.target_layer_ids == (1, 16, 31, 46, 61)
    assert g.feature_size == 25600
    assert (g.layers, g.heads, g.kv_heads, g.head_dim, g.intermediate_size) == (5, 32, 8, 128, 17408)
    assert (g.block_size, g.mask_token_id) == (16, 248070)
    assert g.layer_types == ("full_attention",) * 5 and g.sliding_window is None
    assert (g.rope_theta, g.rms_norm_eps, g.eos_token_id) == (1e7, 1e-6, 248044)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_full_size_recipes_fit_a_card_and_the_tiles_of_flex_attention(name):
    recipe = full_size(name)
    geometry = resolve(recipe)
    assert recipe.data.budget % FLEX_BLOCK == 0
    assert recipe.train.anchors * geometry.block_size % FLEX_BLOCK == 0
    assert sum(memory.drafter_need(recipe, geometry, torch.bfloat16).values()) < 60 * memory.GIB


def test_the_original_configuration_and_the_papers_values():
    original, paper = map(full_size, FULL_SIZE)
    assert original.data.budget == 49152 and original.train.gamma == 10
    assert original.topology.named == (5, 3) and original.rows_per_step == 3
    assert paper.train.gamma == 7 and paper.train.anchors_per_document == 512
    assert paper.data.max_document == 3072
    for recipe in (original, paper):
        assert (recipe.train.lr, recipe.train.warmup_share, recipe.train.clip) == (6e-4, 0.04, 1.0)
    sequences, filled = 800_000, 3072 / 2
    epochs = paper.train.steps * paper.rows_per_step * paper.data.budget / (sequences * filled)
    assert math.isclose(epochs, 6, rel_tol=0.01)


def test_what_the_recipe_says_of_another_split_follows_from_the_arithmetic():
    recipe = full_size("qwen3.6-27b")
    targets, drafters = auto_split(recipe, resolve(recipe), 8)
    assert (targets, drafters) == (7, 1)
    said = (PAYLOAD / "recipes/qwen3.6-27b.yaml").read_text()
    more = targets / recipe.topology.named[0]  # the targets are the slower side in both
    assert f"`auto` gives {targets}:{drafters} here: by arithmetic {more:.1f} x the rows" in said


def test_sliding_layers_as_the_published_3_6_drafter_has_them():
    types = ["sliding_attention"] * 4 + ["full_attention"]
    overrides = {"target.model": str(MODEL_27B), "drafter.layer_types": types, "drafter.sliding_window": 2048}
    g = resolve(load_recipe("qwen3.6-27b", PAYLOAD, overrides))
    assert g.layer_types == tuple(types) and g.sliding_window == 2048
