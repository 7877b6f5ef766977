"""The step against torch's own AdamW and clip on parameters that lie apart, and the learning rate's curve."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.drafter_cases import replica
from trainer.config import TrainConfig
from trainer.optimizer import BETA1, learning_rate


@pytest.mark.parametrize("size", [1e-3, 1e3])  # gradients below the clip, and far above it
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch_on_separate_tensors(size, weight_decay):
    made = replica(steps=10, lr=1e-2, warmup_share=0.2, weight_decay=weight_decay, beta2=0.95)
    names = [name for name, _ in made.drafter.named_parameters()]
    apart = {name: p.detach().clone().requires_grad_() for name, p in made.drafter.named_parameters()}
    groups = [
        {"params": [p for p in apart.values() if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in apart.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    truth = torch.optim.AdamW(groups, lr=1.0, betas=(BETA1, 0.95), foreach=False)
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        for name, parameter in made.drafter.named_parameters():
            drawn = size * torch.randn(parameter.shape, generator=draw)
            parameter.grad.copy_(drawn)
            apart[name].grad = drawn / 7.0
        wanted = torch.nn.utils.clip_grad_norm_(apart.values(), 1.0)
        for group in truth.param_groups:
            group["lr"] = learning_rate(made.recipe.train, step)
        truth.step()
        lr, norm = made.optimizer.step(step, torch.tensor(7.0, dtype=torch.float64))
        assert lr == learning_rate(made.recipe.train, step)
        assert float(norm) == pytest.approx(float(wanted), rel=1e-4)
        assert not made.storage.gradients.any()
    for name in names:
        assert torch.allclose(made.drafter.get_parameter(name), apart[name], rtol=1e-4, atol=1e-5), name


def test_a_step_without_any_label_changes_nothing():
    made = replica()
    before = made.storage.weights.clone()
    _, norm = made.optimizer.step(0, 0.0)
    assert float(norm) == 0.0
    assert torch.equal(made.storage.weights, before)


def test_the_rate_rises_evenly_and_falls_as_a_cosine_to_zero():
    train = TrainConfig(steps=100, lr=2.0, warmup_share=0.1)
    rates = [learning_rate(train, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0) == max(rates)
    assert rates[55] == pytest.approx(1.0)
    assert 0 < rates[99] < 1e-3
    assert rates[9:] == sorted(rates[9:], reverse=True)
