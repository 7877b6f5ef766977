"""A replica's step against the paper's formulas, and what a step must never do: compile, wait, forget."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo.utils import counters

from tests.trainer.drafter_cases import BUDGET, GEOMETRY, a_row, plain_loss, replica
from trainer import compile_watch, islands, masks, memory
from trainer.anchors import draw_anchors
from trainer.handoff import own_stream
from trainer.seeding import generator


def gradients(made) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in made.drafter.named_parameters()}


@pytest.fixture(scope="module")
def truth():
    """Loss and gradients of rows 0 and 1 together, by the plain formulas."""
    made = replica()
    weights = {n: p.detach().clone().requires_grad_() for n, p in made.drafter.named_parameters()}
    losses = []
    for index in (0, 1):
        row, features = a_row(index)
        blocks = draw_anchors(row, 32, generator(0, "anchors", index))
        losses.append(plain_loss(weights, made.head, row, features, blocks.anchors[blocks.valid].tolist()))
    sum(losses).backward()
    return [float(loss.detach()) for loss in losses], {n: w.grad for n, w in weights.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_of_two_rows_are_those_of_the_formulas(truth, checkpointing):
    losses, wanted = truth
    made = replica(activation_checkpointing=checkpointing)
    found = [made.backward(*a_row(index)) for index in (0, 1)]
    assert [float(c.numbers[0]) for c in found] == pytest.approx(losses, rel=1e-4)
    for name, gradient in gradients(made).items():
        assert gradient.abs().max() > 0, name
        assert torch.allclose(
            gradient, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max())
        ), name


def test_products_in_bf16_keep_gradients_and_masters_in_fp32(truth):
    _, wanted = truth
    made = replica(dtype=torch.bfloat16)
    for index in (0, 1):
        made.backward(*a_row(index))
    for name, gradient in gradients(made).items():
        assert gradient.dtype == torch.float32
        likeness = torch.cosine_similarity(gradient.flatten(), wanted[name].flatten(), dim=0)
        assert likeness > 0.99, (name, float(likeness))
    before = made.drafter.fc.weight.detach().clone()
    made.optimizer.step(0, 1.0)
    assert made.drafter.fc.weight.dtype == torch.float32
    assert not torch.equal(before, made.drafter.fc.weight)
    assert torch.equal(made.storage.compute, made.storage.weights.bfloat16())  # products read the new weights


def test_every_parameter_and_gradient_lives_in_the_flat_tensors():
    made = replica()
    total = sum(parameter.numel() for parameter in made.drafter.parameters())
    assert total == GEOMETRY.parameter_count()
    made.storage.weights.fill_(2.0)
    made.storage.gradients.fill_(3.0)
    assert all((p == 2).all() and (p.grad == 3).all() for p in made.drafter.parameters())
    assert sum(len(part) for part in made.gradients()) == len(made.storage.gradients)


def test_contributions_add_up_and_count_what_is_supervised():
    made = replica()
    row, features = a_row(2)
    contribution = made.backward(row, features)
    slots = GEOMETRY.block_size - 1
    assert contribution.numbers.dtype == torch.float64 and contribution.numbers.shape == (2 + 2 * slots,)
    assert contribution.tokens == row.tokens < BUDGET
    correct, counted = contribution.numbers[2:].split(slots)
    assert (correct <= counted).all() and counted[0] >= counted[-1] > 0
    once = made.storage.gradients.clone()
    made.backward(row, features)
    assert torch.allclose(made.storage.gradients, 2 * once)


def test_warm_up_leaves_no_trace():
    made = replica()
    before = made.storage.weights.clone()
    made.warm_up(a_row(0)[0])
    assert torch.equal(made.storage.weights, before)
    assert not made.storage.gradients.any()


class Card(str):
    """torch takes it for the device whose name it is, the trainer for a card."""

    type = "cuda"


@pytest.fixture
def on_a_card(monkeypatch):
    """A replica that proves its warm-up as on a card, and what one step is seen to take there in bytes."""
    taken = {"bytes": 0}
    resident = 5 << 30
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: resident)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: resident + taken["bytes"])
    made = replica()
    made.device = Card("cpu")
    torch._dynamo.reset()
    return made, taken


def test_a_warm_up_that_made_other_graphs_than_the_islands_is_an_error(on_a_card):
    made, _ = on_a_card
    once = torch.compile(islands.swiglu, backend="eager", dynamic=False)
    made.drafter.islands = islands.Islands(swiglu=once)
    with pytest.raises(RuntimeError, match=r"the drafter compiled 1 graphs, expected 9: swiglu \d"):
        made.warm_up(a_row(0)[0])
    made.warm_up(a_row(0)[0])  # nothing more to compile: as after a warm-up before


def test_a_step_that_takes_more_memory_than_was_estimated_is_an_error(on_a_card):
    made, taken = on_a_card
    taken["bytes"] = memory.step_need(made.recipe, GEOMETRY, made.dtype)
    made.warm_up(a_row(0)[0])
    taken["bytes"] += 1
    with pytest.raises(RuntimeError, match=r"a drafter's step took 0\.\d+ GiB, expected at most 0\.\d+"):
        made.warm_up(a_row(0)[0])


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Flex attention's backward pass, which torch refuses on a CPU although its dense form runs there."""
    import torch.nn.attention.flex_attention as flex

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)
    real = masks.build_masks
    monkeypatch.setattr("trainer.replica.build_masks", lambda *a, **k: real(*a, **k, backend="flex"))
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_islands_make_one_graph_each_and_rows_of_other_documents_none(
    flex_on_cpu, truth, checkpointing
):
    _, wanted = truth
    made = replica(activation_checkpointing=checkpointing)
    made.drafter.islands = islands.all_compiled(backend="eager")
    made.warm_up(a_row(5)[0])
    assert counters["stats"]["unique_graphs"] == islands.GRAPHS_PER_DRAFTER

    torch.compiler.set_stance("fail_on_recompile")
    for index in (0, 1):
        made.backward(*a_row(index))
    for name, gradient in gradients(made).items():
        assert torch.allclose(
            gradient, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max())
        ), name
    for index in range(2, 8):
        made.backward(*a_row(index))
        made.optimizer.step(index, 1.0)
    assert counters["stats"]["unique_graphs"] == islands.GRAPHS_PER_DRAFTER


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_on_the_gpu_follows_the_formulas_and_never_waits_for_the_device(truth):
    _, wanted = truth
    device = torch.device("cuda", 0)
    made = replica(device, torch.bfloat16)
    made.drafter.islands = islands.compiled(device)
    made.warm_up(a_row(5)[0])
    prepared = [(row, features.to(device, torch.bfloat16)) for row, features in (a_row(0), a_row(1))]
    found: dict[str, torch.Tensor] = {}
    failures: list[BaseException] = []

    def steps() -> None:
        """As a drafter's thread runs them: on a stream of its own, nothing compiled there before."""
        try:
            with own_stream(device):
                for row, features in prepared:
                    made.backward(row, features)
                found.update({name: p.grad.clone() for name, p in made.drafter.named_parameters()})
                made.optimizer.step(0, torch.ones((), device=device))
        except BaseException as error:
            failures.append(error)

    compile_watch.forbid_recompiles()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        compile_watch.allow_recompiles()
    assert not failures, failures
    torch.cuda.synchronize()
    for name, gradient in found.items():
        likeness = torch.cosine_similarity(gradient.flatten().cpu(), wanted[name].flatten(), dim=0)
        assert likeness > 0.98, (name, float(likeness))
