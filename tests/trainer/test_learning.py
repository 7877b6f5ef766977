"""The learning run proves the trainer only if its text, its clock and its stages do what they say."""

from __future__ import annotations

import functools
import inspect
import json

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from bench import learning, learning_target, learning_text, learning_train
from bench.common import config_folder
from bench.learning_plan import plan_of
from bench.learning_text import END, START, Unit
from trainer.data import load_corpus

SOURCE = '''import os

class Tree:
    """Leaves
and more."""

    def grow(
        self, height
    ) -> int:

        return height + 1

    @property
    def leaves(self):
        return [leaf for leaf in self]

def plant(where):
    return Tree()
'''


@pytest.fixture(scope="module")
def corpus():
    """Tokenizer and units of a part of the standard library."""
    units = learning_text.collect(300, 48, packages=())
    return learning_text.train_tokenizer((unit.text for unit in units), 640), units


def test_units_are_whole_functions_without_their_indentation():
    found = {unit.text.split("(")[0].split(":")[0]: unit for unit in learning_text.units("a.py", SOURCE, 500)}
    assert list(found) == ["class Tree", "def grow", "def leaves", "def plant"]
    assert found["def grow"].text == "def grow(\n    self, height\n) -> int:\n\n    return height + 1"
    assert found["def leaves"].text == "def leaves(self):\n    return [leaf for leaf in self]"
    assert found["def plant"].text == "def plant(where):\n    return Tree()"
    assert all(unit.whole for unit in found.values())


def test_a_unit_that_is_cut_is_not_whole():
    unit = next(u for u in learning_text.units("a.py", SOURCE, 30) if u.text.startswith("def grow"))
    assert unit == Unit("a.py", "def grow(\n    self, height\n) -", False)


def test_a_file_is_held_out_as_a_whole(corpus):
    _, units = corpus
    sides = {side: {u.file for u in units if u.held_out is side} for side in (True, False)}
    assert sides[True] and sides[False] and not sides[True] & sides[False]


def test_samples_are_what_the_trainer_reads_back(corpus, tmp_path):
    tokenizer, units = corpus
    samples = learning_text.conversations(tokenizer, units[:60], 24, 48)
    written = [row[:n] for row, n in zip(samples.ids.tolist(), samples.lengths.tolist(), strict=True)]
    assert len(written) > 40
    with (tmp_path / "text.jsonl").open("w") as file:
        for number, ids in enumerate(written):
            line = learning_target.conversation(tokenizer, str(number), ids[:24], ids[24:])
            file.write(json.dumps(line) + "\n")
    read = load_corpus(tmp_path / "text.jsonl", tokenizer, max_document=100).documents
    for ids, row, document in zip(written, samples.ids.tolist(), read, strict=True):
        assert ids[0] == START and not any(row[len(ids) :])
        assert document.ids[document.loss_mask].tolist() == ids[24:]
        assert document.ids[:24].tolist() == ids[:24] and not document.loss_mask[:24].any()
    ended = [ids[-1] == END for ids in written]
    assert any(ended) and not all(ended), "both whole and cut ones"


def test_text_is_cut_where_it_gets_stuck():
    stuck = [1, *range(20, 28), *range(20, 28), *range(20, 28), *range(20, 28), 9]
    assert learning_target.before_the_loop(stuck) == stuck[:25]
    assert learning_target.before_the_loop([*range(60)]) == [*range(60)]


def test_unusable_answers_are_named(corpus):
    tokenizer, units = corpus
    good = learning_text.encode(tokenizer, [units[5].text[:60]])[0]
    letters = learning_text.encode(tokenizer, [*"return"])  # the tokenizer writes it as fewer tokens
    spelled = [token for one in letters for token in one]
    kept, dropped = learning_target.usable(
        tokenizer, [good, [*good, END], [START, *good], good[:3], spelled], 5
    )
    assert kept == [good, [*good, END], None, None, None]
    assert sorted(dropped.values()) == [1, 1, 1]
    assert any("special token" in reason for reason in dropped)


def test_training_never_calls_the_fast_recurrence(corpus, monkeypatch):
    """Its backward is refused on the very GPUs that this is made for."""
    tokenizer, units = corpus

    @functools.wraps(inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule))
    def fast(*arguments, **options):
        raise AssertionError("the fast kernel was called")

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", fast)
    samples = learning_text.conversations(tokenizer, units[:8], 24, 48)
    cpu = torch.device("cpu")
    model = learning_target.new_target(config_folder("hybrid-tiny"), len(tokenizer), cpu)
    before = model.model.layers[0].linear_attn.in_proj_qkv.weight.detach().clone()
    learning_target.pretrain(model, samples, steps=2, seconds=60, batch=4, lr=1e-2)
    assert not torch.equal(before, model.model.layers[0].linear_attn.in_proj_qkv.weight)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is fast, "what comes after training is fast again"
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(AssertionError, match="was called"):
        model(input_ids=torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize(
    ("step_s", "expected"), [(0.1, None), (0.14, None), (0.2, 0.2), (0.01, 0.01), (None, None)]
)
def test_a_run_at_the_wrong_pace_is_noticed(tmp_path, step_s, expected):
    (tmp_path / "state.json").write_text(json.dumps({"step_time_s": step_s}))
    assert learning_train._wrong_pace(tmp_path, steps=1000, seconds=100.0) == expected


def test_the_times_of_all_stages_fill_the_minutes():
    plan = plan_of(minutes=5, small=False)
    assert sum(plan.seconds.values()) == pytest.approx(5 * 60 - 160)
    assert plan_of(minutes=0.1, small=False).seconds["train"] > 0


def test_a_stage_without_what_it_needs_says_so_and_fails(tmp_path, capsys):
    assert learning.main(["generate", "--out", str(tmp_path), "--small", "--device", "cpu"]) == 1
    assert "generate needs what pretrain leaves" in capsys.readouterr().out


@pytest.mark.slow
def test_all_stages_on_a_cpu(tmp_path, capfd):
    command = ["--out", str(tmp_path), "--small", "--device", "cpu"]
    assert learning.main(command) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["train"]["bf16"]["phase"] == "finished" and result["train"]["bf16"]["steps"] == 12
    checked = result["check"]
    assert checked["holds"] and checked["committed_equals_greedy"] == checked["documents"] == 4
    assert checked["difference"] == pytest.approx(0, abs=1e-6), "one precision, so nothing may differ"
    assert checked["tau_loop"] > 1.05, "a drafter that learned nothing would prove nothing"
    assert (tmp_path / "learning.png").stat().st_size > 20_000
    metrics = (tmp_path / "bf16.metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in metrics]
    assert losses[-1] < losses[0] - 0.5
    capfd.readouterr()
    assert learning.main(command) == 0  # everything is there: nothing runs again
    assert "==" not in capfd.readouterr().out
