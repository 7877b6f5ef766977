"""A drafter that starts from its target's last layers holds exactly them, or is refused with the mend."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.faults.table import fault
from trainer.config import load_recipe
from trainer.drafter import Drafter, initialise
from trainer.errors import Refusal
from trainer.geometry import resolve
from trainer.warm_start import from_target


def started(release, *overrides: str) -> Drafter:
    recipe = load_recipe("tiny", release, list(overrides))
    drafter = Drafter(resolve(recipe))
    initialise(drafter, 0)
    from_target(drafter, recipe.target.model)
    return drafter


def test_layers_and_norm_are_the_targets_last_and_the_last_tap_passes_through(tiny_release, tiny_target):
    drafter = started(tiny_release, "drafter.intermediate_size=64")
    truth = load_file(tiny_target / "model.safetensors")
    assert torch.equal(drafter.norm.weight, truth["model.norm.weight"])
    for mine, theirs in ((0, 2), (1, 3)):
        for name in ("self_attn.k_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            wanted = truth[f"model.layers.{theirs}.{name}"]
            assert torch.equal(drafter.layers[mine].get_parameter(name), wanted)
    features = torch.randn(6, 64)
    passed = torch.nn.functional.linear(features, drafter.fc.weight)
    assert torch.allclose(passed, features[:, 32:], atol=0.1)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("drafter.intermediate_size=48", r"its layers\.2\.mlp\.gate_proj\.weight is of shape \[64, 32\]"),
        ("drafter.head_dim=4", r"its layers\.2\.self_attn\.q_proj\.weight is of shape"),
    ],
)
def test_another_geometry_is_refused_with_the_mend(tiny_release, override, complaint):
    with pytest.raises(Refusal, match=complaint):
        started(tiny_release, override)


@fault(
    "NaN in a tensor of the target that only `drafter.init: target` reads",
    promised="refused before the training, with the tensor's name: no advice to lower the rate",
    seen="`layers.3.mlp.up_proj.weight has NaN or infinite values: fetch it again`",
    part="files",
)
def test_a_tensor_that_is_no_number_is_named(tiny_release, tiny_target, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_target, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][3].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refusal) as refused:
        started(tiny_release, "drafter.intermediate_size=64", f"target.model={broken}")
    assert "layers.3.mlp.up_proj.weight has NaN or infinite values: fetch it again" in str(refused.value)
