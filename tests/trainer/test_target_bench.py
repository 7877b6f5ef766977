"""The target's benchmark runs whole where there is no GPU, and its random models are like the real ones."""

from __future__ import annotations

import torch

from bench import target
from bench.common import config_folder
from bench.random_target import build_random_target, small_hybrid, taps, text_config


def test_it_runs_whole_at_a_small_size(capsys):
    assert target.main(["--small", "--reference"]) == 0
    said = capsys.readouterr().out
    assert "all sections ran, all comparisons held" in said and "delta_inputs island" in said
    assert "packed against alone" in said and "tok/s" in said


def test_the_27b_geometry_is_the_published_one():
    config = text_config(config_folder("qwen3.5-27b"))
    assert taps(config) == (1, 16, 31, 46, 61)
    with torch.device("meta"):
        from transformers import AutoModel

        model = AutoModel.from_config(config)
    layers = sum(p.numel() for p in model.layers.parameters())
    assert (
        round(layers / 1e9, 2) == 24.35
        and round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 25.62
    )
    assert [type(x).__name__ for x in (model.layers[0].linear_attn, model.layers[3].self_attn)] == [
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5Attention",
    ]


def test_a_random_target_for_other_benchmarks(tmp_path):
    small_hybrid().save_pretrained(tmp_path)
    made, head = build_random_target(tmp_path, torch.device("cpu"), torch.float32, layers=4)
    assert made.layer_ids == (0, 1, 2, 3) and head.lm_head.shape == (512, 64)
    features = made.features_alone(torch.arange(3, 40))
    assert features.shape == (37, 4 * 64) and features.isfinite().all()
    sizes = features.unflatten(1, (4, 64)).pow(2).mean((0, 2)).sqrt()
    assert (sizes > 0.01).all() and (sizes < 10).all(), sizes
