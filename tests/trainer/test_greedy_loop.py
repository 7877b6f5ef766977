"""The loop that checks the trainer's tau must itself be right: greedy text whatever is drafted."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.common import config_folder
from bench.greedy_loop import Answer, causal_lm, greedy, speculate, tau
from bench.learning_target import answer
from bench.learning_text import END

LENGTH = 64
PROMPTS = [[5, 9, 30, 11], [5, 40, 41, 42, 43, 44, 45], [7, 8, 9]]
LIMITS = [20, 12, 17]


@functools.cache
def hybrid():
    """Random Qwen3.5 text model, three recurrent layers and one with attention."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(config_folder("hybrid-tiny"), vocab_size=64, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@functools.cache
def dense():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@functools.cache
def own_answers(model) -> list[list[int]]:
    return greedy(causal_lm(model(), [0]), PROMPTS, LIMITS, END, LENGTH)


def scripted(texts: list[list[int]], right: int, block: int = 5):
    """Drafts that agree with `texts` (prompt and answer) for `right` tokens and are wrong from there on."""

    def draft(features, before, anchors):
        rows = []
        for text, at, anchor in zip(texts, before.tolist(), anchors.tolist(), strict=True):
            assert text[at] == anchor
            truth = (text[at + 1 : at + block] + [0] * block)[: block - 1]
            rows.append([t if k < right else (t + 1) % 64 for k, t in enumerate(truth)])
        return torch.tensor(rows)

    return draft


@pytest.mark.parametrize("model", [hybrid, dense])
@pytest.mark.parametrize("right", [0, 2, 4])
def test_committed_text_is_the_targets_own_whatever_is_drafted(model, right):
    own = own_answers(model)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, own, strict=True)]
    draft = scripted(texts, right)
    committed = speculate(causal_lm(model(), [0, 2]), draft, PROMPTS, LIMITS, END, LENGTH)
    assert [one.ids for one in committed] == own
    # each cycle commits `right` drafts and one more; the first token comes from prefill
    assert [one.cycles for one in committed] == [math.ceil((len(one) - 1) / (right + 1)) for one in own]


@pytest.mark.parametrize("model", [hybrid, dense])
def test_greedy_text_is_that_of_cached_generation(model):
    prompts = [[5, 9, 30, 11], [5, 40, 41, 42], [7, 8, 9, 10]]
    found = greedy(causal_lm(model(), [0]), prompts, [12] * 3, END, 16)
    cached = answer(model(), torch.tensor(prompts), 12).tolist()
    assert found == [row[: row.index(END) + 1] if END in row else row for row in cached]


def test_end_token_inside_an_accepted_draft_ends_the_answer():
    text = [5, 6, 7, 8, END, 9, 10]

    def target(ids):  # a fixed text: what follows position p is text[p + 1]
        after = torch.tensor([*text[1:], *[0] * (ids.shape[1] - len(text) + 1)])
        return after.expand(len(ids), -1), torch.zeros(*ids.shape, 1)

    assert greedy(target, [[5]], [9], END, 16) == [[6, 7, 8, END]]
    assert speculate(target, scripted([text], 4), [[5]], [9], END, 16) == [Answer([6, 7, 8, END], 1)]
    assert speculate(target, scripted([text], 4), [[5]], [3], END, 16) == [Answer([6, 7, 8], 1)]


def test_features_are_the_outputs_of_the_named_layers():
    ids = torch.tensor([PROMPTS[0]])
    for model in (hybrid(), dense()):
        before = dict(model.model.layers[0]._forward_hooks)
        _, features = causal_lm(model, [0, 1])(ids)
        assert model.model.layers[0]._forward_hooks == before, "nothing is left behind"
        states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
        assert torch.equal(features, torch.cat([states[1], states[2]], dim=-1))


def test_tau_is_the_mean_over_answers_and_nan_without_one():
    answers = [Answer([1] * 5, 2), Answer([1] * 4, 3), Answer([1], 0)]  # the last one is prefill alone
    assert tau(answers) == pytest.approx((4 / 2 + 3 / 3) / 2)
    assert math.isnan(tau([]))


def test_nothing_of_the_trainer_is_used():
    import bench.greedy_loop as module

    source = Path(module.__file__).read_text(encoding="utf-8")
    assert "import trainer" not in source and "from trainer" not in source
