"""Packing is invisible in the features, and targets for which it would not be are refused."""

from __future__ import annotations

import pytest
import torch

from trainer.config import load_recipe
from trainer.data import Document, pack
from trainer.errors import Refusal
from trainer.geometry import resolve
from trainer.target import Target
from trainer.target_loading import load_target

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
