"""The walk over one feature pass gives the tau of a real greedy speculative loop, written here plainly."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

from bench import greedy_loop
from bench.greedy_loop import Answer, ServedDrafter, causal_lm, speculate
from trainer import islands
from trainer.acceptance import evaluate, spans, walk
from trainer.compile_watch import CompileWatch
from trainer.data import Document, load_corpus, load_tokenizer
from trainer.drafter import Drafter, initialise
from trainer.export import checkpoint_config
from trainer.geometry import DrafterGeometry
from trainer.masks import DenseMask
from trainer.target import SharedHead

ROOT = Path(__file__).parents[2]
REAL = ROOT / ".sandbox/models/smollm2-135m-instruct"
HELDOUT = ROOT / "remote_payload/examples/heldout.jsonl"
CPU = torch.device("cpu")
END = 7  # the end token of the tiny target


@dataclass
class Case:
    """A target, the drafter of its text, and the documents: prompt, then what the target wrote greedily."""

    target: Any
    drafter: Drafter
    documents: list[Document]
    end: int

    @property
    def head(self) -> SharedHead:
        return SharedHead(self.target.get_input_embeddings().weight, self.target.lm_head.weight)

    def taps(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """[n, K*H]: HF's hidden_states[i + 1] is the output of layer i."""
        return torch.cat([hidden_states[i + 1][0] for i in self.drafter.geometry.target_layer_ids], dim=-1)

    def features(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.taps(self.target.model(input_ids=ids[None], output_hidden_states=True).hidden_states)

    def evaluate(self):
        return evaluate(
            self.drafter, self.head, self.documents, self.features, device=CPU, dtype=torch.float32
        )


def speculate_all(case: Case) -> list[Answer]:
    """The same responses by real speculative decoding (bench/greedy_loop.py); asserts that it writes the very
    documents. The drafter goes there as its checkpoint would: names, tensors, config.json."""
    turns = [(d.ids.tolist(), *span) for d in case.documents for span in spans(d.loss_mask)]
    limits = [last - first + 1 for _, first, last in turns]
    config = checkpoint_config(case.drafter.geometry)
    weights = {name: tensor.detach() for name, tensor in case.drafter.state_dict().items()}
    drafter = ServedDrafter(config, weights, case.head.embed_tokens, case.head.lm_head)
    answers = speculate(
        causal_lm(case.target, case.drafter.geometry.target_layer_ids),
        drafter,
        [ids[:first] for ids, first, _ in turns],
        limits,
        case.end,
        max(len(ids) for ids, *_ in turns) + drafter.block_size,
    )
    assert [answer.ids for answer in answers] == [ids[first : last + 1] for ids, first, last in turns]
    return answers


def overfit(case: Case, *, steps: int, anchors: int, lr: float, distractors: int = 64) -> None:
    """Teach the drafter some of the documents' text, so that it is sometimes right and sometimes wrong.

    Its loss looks at the documents' own tokens and every n-th other: a whole vocabulary costs too much here.
    """
    g, draw = case.drafter.geometry, torch.Generator().manual_seed(1)
    size = g.block_size
    features = [case.features(document.ids) for document in case.documents]
    others = torch.arange(0, g.vocab_size, max(1, g.vocab_size // distractors))
    choices = torch.cat([others, *(document.ids for document in case.documents)]).unique()
    rows = case.head.lm_head[choices]
    optimizer = torch.optim.AdamW(case.drafter.parameters(), lr=lr)
    for step in range(steps):
        document = case.documents[step % len(case.documents)]
        ids = document.ids
        context = case.drafter.context(features[step % len(case.documents)], torch.arange(len(ids)))
        possible = [a for a in document.loss_mask.nonzero().flatten().tolist() if a + size <= len(ids)]
        if not possible:
            continue
        at = torch.tensor(possible)[torch.randperm(len(possible), generator=draw)[:anchors]]
        slots = (at[:, None] + torch.arange(size)).flatten()
        block = torch.arange(len(at)).repeat_interleave(size)
        visible = torch.cat([torch.arange(len(ids)) < at[block][:, None], block[:, None] == block], dim=1)
        masks = {"full_attention": DenseMask(visible), "sliding_attention": DenseMask(visible)}
        tokens = torch.where(torch.arange(len(slots)) % size == 0, ids[slots], g.mask_token_id)
        hidden = case.drafter(context, case.head.embed(tokens), slots, masks)
        drafted = torch.arange(len(slots)) % size > 0
        labels = torch.searchsorted(choices, ids[slots][drafted])
        loss = torch.nn.functional.cross_entropy(hidden[drafted] @ rows.T, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@functools.cache
def tiny_target(family: str) -> Any:
    """Six random layers; the hybrid's are recurrent but for every third."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    common = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    if family == "llama":
        config = LlamaConfig(**common, initializer_range=0.35)
    else:
        config = Qwen3_5TextConfig(
            **common,
            initializer_range=0.2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            full_attention_interval=3,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@functools.cache
def tiny_text(family: str) -> list[Document]:
    """Documents of one to three turns; some turns reach the limit, some the end token."""
    target, draw = tiny_target(family), torch.Generator().manual_seed(9)
    documents, limit = [], 40 if family == "llama" else 20
    for number in range(9):
        ids, mask = [], []
        for _ in range(1 + number % 3):
            prompt = torch.randint(0, 63, (6,), generator=draw).tolist()
            ids, mask = ids + prompt, mask + [False] * len(prompt)
            for _ in range(limit):
                with torch.no_grad():
                    token = int(target(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
                ids, mask = [*ids, token], [*mask, True]
                if token == END:
                    break
        documents.append(Document(torch.tensor(ids), torch.tensor(mask), str(number)))
    return documents


def tiny_case(layer_types: tuple[str, ...], block_size: int = 5, family: str = "llama") -> Case:
    geometry = DrafterGeometry(
        hidden_size=48,
        vocab_size=64,
        num_target_layers=6,
        target_layer_ids=(1, 3),
        block_size=block_size,
        mask_token_id=63,
        layers=len(layer_types),
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        layer_types=layer_types,
        sliding_window=12 if "sliding_attention" in layer_types else None,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        eos_token_id=END,
        pad_token_id=None,
    )
    case = Case(tiny_target(family), Drafter(geometry), tiny_text(family), END)
    initialise(case.drafter, seed=2)
    return case


@pytest.mark.parametrize("family", ["llama", "hybrid"])
@pytest.mark.parametrize(
    "layer_types",
    [("full_attention", "full_attention"), ("sliding_attention", "full_attention")],
    ids=["full", "sliding"],
)
def test_walk_equals_a_greedy_speculative_loop_on_a_random_target(layer_types, family):
    case = tiny_case(layer_types, family=family)
    overfit(case, steps=150, anchors=24, lr=3e-3)
    found = case.evaluate()
    answers = speculate_all(case)
    tau, cycles = greedy_loop.tau(answers), sum(answer.cycles for answer in answers)
    assert 1.2 < tau < 4.5, "neither hopeless nor perfect, else the comparison proves nothing"
    # the demand is 0.02; a mask that shows the anchor's own feature moves this tau by only 0.0006
    assert found.tau == pytest.approx(tau, abs=1e-9)
    assert found.cycles == cycles
    ended = [int(d.ids[last]) == case.end for d in case.documents for _, last in spans(d.loss_mask)]
    assert any(ended) and not all(ended)
    assert found.responses == len(ended) and found.documents == 9


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists() or not HELDOUT.exists(), reason="the real model is not on this machine")
def test_walk_equals_a_greedy_speculative_loop_on_the_real_target():
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32).eval().requires_grad_(False)
    config = target.config
    geometry = DrafterGeometry(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_target_layers=config.num_hidden_layers,
        target_layer_ids=(1, 14, 27),
        block_size=8,
        mask_token_id=4,
        layers=1,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate_size=512,
        layer_types=("full_attention",),
        sliding_window=None,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    case = Case(target, Drafter(geometry), [], end=config.eos_token_id)
    initialise(case.drafter, seed=0)
    documents = load_corpus(HELDOUT, load_tokenizer(str(REAL)), max_document=4096).documents
    for document in [d for d in documents if len(d.ids) < 140 and int(d.loss_mask.sum()) > 30][:2]:
        first, last = spans(document.loss_mask)[0]
        stop = min(last, first + 23) + 1  # the loop runs the whole target in every cycle
        case.documents.append(Document(document.ids[:stop], document.loss_mask[:stop], document.key))
    overfit(case, steps=105, anchors=10, lr=1e-3, distractors=4096)
    found = case.evaluate()
    answers = speculate_all(case)
    tau, cycles = greedy_loop.tau(answers), sum(answer.cycles for answer in answers)
    assert 1.1 < tau < 7.5
    assert abs(found.tau - tau) <= 0.02
    assert found.cycles == cycles


def test_walk_counts_accepted_drafts_and_the_targets_own_token():
    # six tokens, five anchors: two drafts and the target's own, then two drafts that end the response
    assert walk([2, 0, 0, 2, 0], 6) == [(2, 3), (2, 2)]


def test_walk_of_useless_drafts_commits_one_token_a_cycle():
    assert walk([0] * 5, 6) == [(0, 1)] * 5


def test_walk_of_perfect_drafts_commits_a_block_a_cycle():
    assert walk([3, 3, 3, 3, 3, 3, 2, 1], 9) == [(3, 4), (3, 4)]


def test_spans_are_the_responses_that_serving_would_draft_for():
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert spans(mask) == [(1, 3), (8, 9)]  # one token alone comes from prefill


def test_rates_by_position_and_the_pooled_tau_agree_with_the_walk():
    case = tiny_case(("full_attention",))
    overfit(case, steps=60, anchors=24, lr=3e-3)
    found = case.evaluate()
    assert len(found.per_position) == 4
    assert 0 < found.per_position[0] < 1
    tokens = sum(last - first for d in case.documents for first, last in spans(d.loss_mask))
    assert found.pooled == pytest.approx(tokens / found.cycles)


def test_batching_of_anchors_changes_nothing(monkeypatch):
    case = tiny_case(("full_attention",), block_size=16)
    whole = case.evaluate()
    monkeypatch.setattr("trainer.acceptance.QUERIES", 128)  # eight blocks at a time
    assert case.evaluate() == whole


def test_nothing_to_measure_is_nan_and_not_an_error():
    case = tiny_case(("full_attention",))
    case.documents = [Document(torch.arange(4), torch.zeros(4, dtype=torch.bool), "silent")]
    found = case.evaluate()
    assert math.isnan(found.tau) and found.cycles == 0 and found.responses == 0
    case.documents = []
    assert math.isnan(case.evaluate().tau)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cuda_gives_the_tau_of_the_cpu_and_compiles_nothing(dtype):
    case = tiny_case(("sliding_attention", "full_attention"))
    overfit(case, steps=150, anchors=24, lr=3e-3)
    expected = case.evaluate()
    device = torch.device("cuda")
    case.drafter.to(device).islands = islands.compiled(device)  # as in training; evaluation goes without
    watch = CompileWatch()
    watch.start()
    embed, head = case.head.embed_tokens.to(device, dtype), case.head.lm_head.to(device, dtype)
    found = evaluate(
        case.drafter, SharedHead(embed, head), case.documents, case.features, device=device, dtype=dtype
    )
    case.drafter.to(CPU)
    assert watch.snapshot()["count"] == 0
    assert found.tau == pytest.approx(expected.tau, rel=0.001 if dtype == torch.float32 else 0.05)
