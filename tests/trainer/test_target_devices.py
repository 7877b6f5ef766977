"""Several target devices: every weight is read once, and each device has its own copy of it."""

from __future__ import annotations

import pytest
import torch

from trainer import weights
from trainer.config import load_recipe
from trainer.geometry import resolve
from trainer.target_loading import load_target, load_targets


def test_each_device_has_all_weights_of_its_own_and_the_folder_is_read_once(tiny_release, monkeypatch):
    """`cpu` and `cpu:0` are two devices to whoever compares them."""
    recipe = load_recipe("tiny", tiny_release)
    model, geometry, ids = recipe.target.model, resolve(recipe), torch.arange(4, 44)
    alone, its_head = load_target(model, geometry, torch.device("cpu"), torch.float32, 64)
    expected = alone.features_alone(ids)
    read, heard, honest = [], [], weights.read

    def watched(wanted, *rest):
        read.append(len(wanted))
        honest(wanted, *rest)

    monkeypatch.setattr(weights, "read", watched)
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    targets, head = load_targets(model, geometry, devices, torch.float32, 64, on_progress=heard.append)
    assert len(read) == 1
    assert [target.device for target in targets] == devices
    assert torch.equal(head.lm_head, its_head.lm_head)
    assert heard[0].startswith("cpu: attention") and any(line.startswith("cpu:0: ") for line in heard)
    for target in targets:
        assert torch.equal(target.features_alone(ids), expected)
    head.embed_tokens.zero_()  # the first device's embedding, too
    assert not torch.equal(targets[0].features_alone(ids), expected)
    assert torch.equal(targets[1].features_alone(ids), expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_have_the_same_features(tiny_release):
    recipe = load_recipe("tiny", tiny_release)
    devices = [torch.device("cuda", n) for n in range(2)]
    model, ids = recipe.target.model, torch.arange(4, 44)
    targets, _ = load_targets(model, resolve(recipe), devices, torch.bfloat16, 64, tokens=512)
    one, other = (target.features_alone(ids) for target in targets)
    assert (one.device, other.device) == tuple(devices)
    assert torch.equal(one.cpu(), other.cpu())
