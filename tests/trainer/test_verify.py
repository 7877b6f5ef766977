"""A good export passes; each way to serve it wrongly is one line that names the place and the mend."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.verify_cases import FULL, SLIDING, SPOILED, change, shards, sliding, store
from trainer.drafter import Drafter, initialise
from trainer.errors import Refusal
from trainer.export import checkpoint_config, export
from trainer.finding import FAIL, OK, WARN
from trainer.geometry import DrafterGeometry
from trainer.verify import main, summary, verify
from trainer.verify_config import check_config, served_causality
from trainer.verify_tensors import expected_tensors

SMALL = DrafterGeometry(
    hidden_size=32,
    vocab_size=101,
    num_target_layers=12,
    target_layer_ids=(1, 5, 9),
    block_size=4,
    mask_token_id=100,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    layer_types=(FULL, FULL),
    sliding_window=None,
    rope_theta=50000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    eos_token_id=2,
    pad_token_id=0,
)
QWEN_27B = dataclasses.replace(
    SMALL,
    hidden_size=5120,
    vocab_size=248320,
    num_target_layers=64,
    target_layer_ids=(1, 16, 31, 46, 61),
    block_size=16,
    mask_token_id=248070,
    layers=5,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=17408,
    layer_types=(FULL,) * 5,
)
TARGET = {
    "model_type": "llama",
    "hidden_size": 32,
    "vocab_size": 101,
    "num_hidden_layers": 12,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drafter = Drafter(SMALL)
    initialise(drafter, seed=3)
    return export(drafter, SMALL, tmp_path_factory.mktemp("good") / "export")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "export"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(TARGET))
    return tmp_path / "target"


def test_a_good_export_has_nothing_but_ok_lines(folder, target):
    findings = verify(folder, str(target))
    assert {f.verdict for f in findings} == {OK}
    assert any("exactly the 25 tensors" in f.what for f in findings)
    assert summary(findings).startswith("ok    0 break serving, 0 to look at")


@pytest.mark.parametrize(("spoil", "verdict", "text"), SPOILED.values(), ids=SPOILED)
def test_each_way_to_serve_it_wrongly_is_one_line(spoil, verdict, text, folder, capsys):
    spoil(folder)
    findings = verify(folder)
    hits = [f for f in findings if f.verdict == verdict and re.search(text, str(f))]
    assert len(hits) == 1, "\n".join(map(str, findings))
    assert "\n" not in str(hits[0]) and hits[0].mend
    assert main([str(folder)]) == (verdict == FAIL)
    assert str(hits[0]) in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "accepted",
    [
        shards(),
        sliding,
        store(lambda t: {f"model.{n}": v for n, v in t.items()}),
        change(dtype=..., torch_dtype="bfloat16"),
        change("dflash_config", causal=False),
        change(is_causal=False),
        change(auto_map={"AutoModel": "z-lab/x--dflash.DFlashDraftModel"}),
    ],
    ids=[
        "shards",
        "sliding",
        "prefix",
        "torch_dtype",
        "causal false",
        "is_causal false",
        "auto_map elsewhere",
    ],
)
def test_what_servers_accept_is_accepted(accepted, folder):
    accepted(folder)
    assert {f.verdict for f in verify(folder)} == {OK}


FOREIGN: dict[str, tuple[dict[str, Any], str, str]] = {
    "hidden": ({"hidden_size": 64}, FAIL, "hidden_size is 32, the target's hidden_size 64"),
    "vocabulary": ({"vocab_size": 105}, FAIL, "vocab_size is 101"),
    "depth": ({"num_hidden_layers": 8}, FAIL, "target layer 9 of the target's 8"),
    "end list": ({"eos_token_id": [2, 100]}, FAIL, "mask token 100 is the target's eos_token_id"),
    "end": ({"eos_token_id": 3}, WARN, "eos_token_id is 2, the target's 3"),
    "context": ({"max_position_embeddings": 1024}, WARN, "max_position_embeddings is 512"),
}


@pytest.mark.parametrize(("values", "verdict", "text"), FOREIGN.values(), ids=FOREIGN)
def test_a_drafter_of_another_target_is_found_out(values, verdict, text, folder, target):
    (target / "config.json").write_text(json.dumps({"text_config": TARGET | values}))
    hits = [f for f in verify(folder, str(target)) if text in str(f)]
    assert [f.verdict for f in hits] == [verdict]


def test_an_ordinary_word_as_mask_token_is_named(folder, target):
    tokenizer = {"added_tokens": [], "model": {"vocab": {"the": 100}}}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert any("mask token 100 is the word 'the'" in str(f) for f in verify(folder, str(target)))
    tokenizer["added_tokens"] = [{"id": 100, "content": "the"}]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert not any("mask token" in f.what and f.verdict != OK for f in verify(folder, str(target)))


def test_causality_is_what_each_server_takes():
    config = {"layer_types": [SLIDING, FULL], "dflash_config": {"causal": False}}
    assert served_causality(config, "vllm") == [False, False]
    assert served_causality(config, "sglang") == [True, False]
    assert served_causality(config | {"is_causal": True}, "vllm") == [True, True]


def test_the_27b_export_has_58_tensors_and_a_config_without_complaint():
    config = checkpoint_config(QWEN_27B)
    table = expected_tensors(config)
    assert table is not None and len(table) == 58
    with torch.device("meta"):
        assert {n: tuple(t.shape) for n, t in Drafter(QWEN_27B).state_dict().items()} == table
    assert {f.verdict for f in check_config(config)} == {OK}


def test_one_json_document_says_the_same(folder, capsys):
    change(is_causal=True)(folder)
    assert main([str(folder), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1 and document["ok"] is False
    assert [f["what"] for f in document["findings"] if f["verdict"] == FAIL] == [
        "is_causal makes full layers causal inside the block"
    ]


def test_usage_is_told_apart_from_findings(folder, tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(folder), "--target", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("refused: ") == 2
    with pytest.raises(Refusal, match="no such folder"):
        verify(folder / "config.json")
