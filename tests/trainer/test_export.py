"""An exported folder has the names, shapes and keys that servers read, and loads back to the same drafter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from trainer.anchors import Blocks
from trainer.drafter import Drafter, block_inputs, initialise
from trainer.errors import Refusal
from trainer.export import checkpoint_config, export, load_export
from trainer.geometry import DrafterGeometry
from trainer.masks import build_masks

SMALL = DrafterGeometry(
    hidden_size=48,
    vocab_size=101,
    num_target_layers=12,
    target_layer_ids=(1, 5, 9),
    block_size=4,
    mask_token_id=100,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=8,
    rope_theta=50000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    eos_token_id=2,
    pad_token_id=None,
)
# z-lab/Qwen3.5-27B-DFlash
QWEN_27B = DrafterGeometry(
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
    layer_types=("full_attention",) * 5,
    sliding_window=None,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    max_position_embeddings=262144,
    eos_token_id=248044,
    pad_token_id=248044,
)


def tensors_of(g: DrafterGeometry) -> dict[str, tuple[int, ...]]:
    """The published table, written from the checkpoint format and not from the drafter."""
    h, q, kv, d, inner = (
        g.hidden_size,
        g.heads * g.head_dim,
        g.kv_heads * g.head_dim,
        g.head_dim,
        g.intermediate_size,
    )
    table: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(g.target_layer_ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(g.layers):
        for name, shape in {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }.items():
            table[f"layers.{i}.{name}.weight"] = shape
    return table


@pytest.fixture
def drafter() -> Drafter:
    made = Drafter(SMALL)
    initialise(made, seed=3)
    with torch.no_grad():  # norms away from one, so that a lost norm shows
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(parameter)))
    return made


def outputs(drafter: Drafter) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    g, ids, positions = SMALL, torch.randint(0, 90, (24,), generator=draw), torch.arange(24)
    features = torch.randn(24, g.feature_size, generator=draw)
    embed = torch.randn(g.vocab_size, g.hidden_size, generator=draw)
    blocks = Blocks(torch.tensor([3, 11, 17]), torch.ones(3, dtype=torch.bool))
    tokens, slots = block_inputs(ids, positions, blocks.anchors, g)
    masks = build_masks(blocks, positions, g.block_size, g.layer_types, g.sliding_window, heads=g.heads)
    with torch.no_grad():
        return drafter(drafter.context(features, positions), embed[tokens], slots, masks)


def test_the_27b_drafter_has_the_58_published_tensors():
    with torch.device("meta"):
        state = Drafter(QWEN_27B).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert len(shapes) == 58
    assert shapes == tensors_of(QWEN_27B)
    assert shapes["layers.4.mlp.down_proj.weight"] == (5120, 17408) and shapes["fc.weight"] == (5120, 25600)


def test_the_27b_config_has_the_published_keys_and_values():
    published = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "num_target_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 5,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 5,
        "rope_theta": 10000000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "rope_scaling": None,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "pad_token_id": 248044,
    }
    config = checkpoint_config(QWEN_27B)
    assert {key: config.get(key, "absent") for key in published} == published


@pytest.mark.parametrize("geometry", [SMALL, QWEN_27B], ids=["small", "27b"])
def test_nothing_that_makes_a_server_draft_wrongly_is_written(geometry):
    text = json.dumps(checkpoint_config(geometry))
    for key in ("is_causal", "partial_rotary_factor", "mrope", "auto_map", "text_config", "quantization"):
        assert key not in text


def test_exported_file_is_bf16_and_holds_exactly_the_table(drafter, tmp_path):
    folder = export(drafter, SMALL, tmp_path / "export")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensors_of(SMALL)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["fc.weight"], drafter.fc.weight.bfloat16())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file without it


def test_reloaded_drafter_gives_equal_outputs(drafter, tmp_path):
    folder = export(drafter, SMALL, tmp_path / "export")
    loaded = load_export(folder)
    assert loaded.geometry == SMALL
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(outputs(loaded.float()), outputs(drafter))


def test_transformers_reads_the_config_as_the_qwen3_it_claims_to_be(drafter, tmp_path):
    config = AutoConfig.from_pretrained(export(drafter, SMALL, tmp_path / "export"))
    assert type(config).__name__ == "Qwen3Config"
    assert (
        config.rope_parameters["rope_theta"] == 50000.0 and config.rope_parameters["rope_type"] == "default"
    )
    assert config.layer_types == ["sliding_attention", "full_attention"] and config.sliding_window == 8
    assert config.dflash_config["target_layer_ids"] == [1, 5, 9] and config.block_size == 4
    assert config.head_dim == 16 and config.num_target_layers == 12


def test_a_second_export_replaces_the_first_and_leaves_no_debris(drafter, tmp_path):
    export(drafter, SMALL, tmp_path / "export")
    (tmp_path / "export" / "stale").touch()
    with torch.no_grad():
        drafter.fc.weight.zero_()
    export(drafter, SMALL, tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert not (tmp_path / "export" / "stale").exists()
    assert not load_export(tmp_path / "export").fc.weight.any()


def test_an_export_that_fails_leaves_the_earlier_one(drafter, tmp_path):
    export(drafter, SMALL, tmp_path / "export")
    before = (tmp_path / "export" / "model.safetensors").read_bytes()
    broken = dataclasses.replace(SMALL, rope_theta=complex(1))  # what JSON cannot hold
    with pytest.raises(TypeError):
        export(drafter, broken, tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors").read_bytes() == before


def test_a_place_that_takes_no_folder_is_refused_in_one_line(drafter, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match=r"export cannot be written .*: free room"):
        export(drafter, SMALL, tmp_path / "file" / "export")


def spoil_config(folder: Path, key: str, value: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def spoil_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


SPOILED = {
    "no config": (lambda f: (f / "config.json").unlink(), "cannot be read"),
    "empty config": (lambda f: (f / "config.json").write_text("{}"), "has no 'hidden_size'"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "broken weights": (lambda f: (f / "model.safetensors").write_bytes(b"short"), "cannot be read"),
    "no size": (lambda f: spoil_config(f, "hidden_size", "x"), "config.json asks for the impossible"),
    "less than nothing": (lambda f: spoil_config(f, "intermediate_size", -1), "negative dimension -1"),
    "no end": (lambda f: spoil_config(f, "num_hidden_layers", 10**30), "num_hidden_layers is 1000"),
    "missing": (lambda f: spoil_tensor(f, "norm.weight", None), "norm.weight is missing"),
    "too many": (lambda f: spoil_tensor(f, "lm_head.weight", torch.zeros(2)), "asks for no such tensor"),
    "wrong shape": (lambda f: spoil_tensor(f, "fc.weight", torch.zeros(48, 96)), "fc.weight is (48, 96)"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_folder_that_is_no_drafter_is_refused_in_one_line(spoil, reason, drafter, tmp_path):
    folder = export(drafter, SMALL, tmp_path / "export")
    spoil(folder)
    with pytest.raises(Refusal) as refusal:
        load_export(folder)
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)
