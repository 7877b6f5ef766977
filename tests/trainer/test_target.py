"""Packing is invisible in the features, and targets for which it would not be are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from trainer.config import load_recipe
from trainer.data import Document, pack
from trainer.errors import Refusal
from trainer.geometry import resolve
from trainer.target import Target, load_target

CPU = torch.device("cpu")


@pytest.fixture
def loaded(tiny_release):
    recipe = load_recipe("tiny", tiny_release)
    return load_target(recipe.target.model, resolve(recipe), CPU, torch.float32, recipe.data.max_document)


def documents(*lengths: int) -> list[Document]:
    draw = torch.Generator().manual_seed(0)
    return [
        Document(torch.randint(4, 260, (n,), generator=draw), torch.ones(n, dtype=torch.bool), str(n))
        for n in lengths
    ]


def test_features_are_the_outputs_of_the_tapped_layers(loaded, tiny_target):
    from transformers import AutoModelForCausalLM

    target, head = loaded
    (document,) = documents(30)
    whole = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.no_grad():
        states = whole(document.ids[None], output_hidden_states=True).hidden_states
    wanted = torch.cat([states[0 + 1][0], states[2 + 1][0]], dim=-1)
    assert torch.allclose(target.features_alone(document.ids), wanted, atol=1e-5)
    assert torch.equal(head.lm_head, whole.lm_head.weight)
    assert torch.equal(head.embed(document.ids), whole.get_input_embeddings()(document.ids))


def test_packed_features_equal_those_of_each_document_alone(loaded):
    target, _ = loaded
    parts = documents(30, 7, 50)
    packed = target.features(pack(parts, 128))
    assert packed.shape == (128, 64)
    start = 0
    for part in parts:
        alone = target.features_alone(part.ids)
        assert torch.allclose(packed[start : start + len(alone)], alone, atol=1e-4)
        start += len(alone)
    target.check_packing(parts, 128)


def test_the_self_check_names_the_layer_in_which_documents_leak(loaded, monkeypatch):
    target, _ = loaded

    def leaky(self: Target, row):  # what a target that ignores document borders computes
        return self._features(row.ids, [len(row.ids)])

    monkeypatch.setattr(Target, "features", leaky)
    with pytest.raises(Refusal, match=r"packed documents change each other: layer 0 deviates by"):
        target.check_packing(documents(30, 40), 128)


def changed(target: Path, folder: Path, **config: object) -> str:
    shutil.copytree(target, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"] * 3 + ["linear_attention"]},
            "has linear_attention layers: their state would leak",
        ),
        (
            {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 64,
            },
            "attends within 64 tokens: lower data.max_document from 128",
        ),
    ],
)
def test_targets_whose_packing_would_be_silently_wrong_are_refused(
    tiny_target, tiny_release, tmp_path, config, complaint
):
    model = changed(tiny_target, tmp_path / "model", **config)
    geometry = resolve(load_recipe("tiny", tiny_release))
    with pytest.raises(Refusal, match=complaint):
        load_target(model, geometry, CPU, torch.float32, 128)


def test_a_missing_or_empty_model_folder_is_one_line(tiny_release, tmp_path):
    geometry = resolve(load_recipe("tiny", tiny_release))
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(Refusal, match=r"^target model /.*") as refusal:
            load_target(str(folder), geometry, CPU, torch.float32, 128)
        assert "\n" not in str(refusal.value)
