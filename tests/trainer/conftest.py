"""A target small enough for tests, real to every library: a random Llama, a byte-level chat tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import yaml

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def byte_tokenizer():
    """One token per byte, ChatML on top; ids 0 to 3 are special, 3 is the mask token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|mask|>"]})
    fast.chat_template = CHATML
    return fast


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def make_target(folder: Path) -> Path:
    """A random 4-layer Llama, hidden 32, vocabulary 260."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_conversations(path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            start = draw.randrange(50)
            answer = " ".join(str(start + k) for k in range(draw.randrange(5, 20)))
            turns = [
                {"role": "user", "content": f"Count from {start}."},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"id": f"c{number}", "conversations": turns}) + "\n")


@pytest.fixture
def tiny_release(tmp_path: Path, tiny_target: Path) -> Path:
    return make_release(tmp_path / "release", tiny_target)


def make_release(release: Path, tiny_target: Path) -> Path:
    """A folder with recipes/tiny.yaml and its examples; runs eagerly, in fp32, with one drafter."""
    for part in ("recipes", "examples"):
        (release / part).mkdir(parents=True)
    write_conversations(release / "examples/train.jsonl", 30, seed=1)
    write_conversations(release / "examples/heldout.jsonl", 3, seed=2)
    recipe = {
        "target": {"model": str(tiny_target), "layer_ids": [0, 2], "dtype": "float32"},
        "drafter": {
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "block_size": 4,
            "mask_token_id": 3,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
        },
        "data": {
            "train": "examples/train.jsonl",
            "heldout": "examples/heldout.jsonl",
            "budget": 256,
            "max_document": 128,
            "min_supervised": 4,
        },
        "train": {
            "steps": 20,
            "lr": 0.003,
            "anchors": 16,
            "gamma": 4,
            "loss_chunk_blocks": 8,
            "checkpoint_every": 4,
            "eval_every": 0,
        },
        "compile": "off",
    }
    (release / "recipes/tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return release
