"""What is loaded equals what transformers loads, from every layout; what is not whole is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer import target_loading, weights
from trainer.config import load_recipe
from trainer.errors import Refusal
from trainer.geometry import DrafterGeometry, resolve
from trainer.target_loading import load_target

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, **more))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))


def gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, sliding_window=16, sliding_window_pattern=2))


def phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SMALL))


def hybrid() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**SMALL, **DELTA_NET}
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "qwen3": qwen3,
    "gemma3": gemma3,
    "phi3": phi3,
    "qwen3.5-multimodal": hybrid,
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model of a kind, in many shards; made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(0)
            made[kind] = tmp_path_factory.mktemp(kind.replace(".", "-"))
            MAKERS[kind]().save_pretrained(made[kind], max_shard_size="30KB")
        return made[kind]

    return folder


@pytest.fixture
def geometry(tiny_release: Path) -> DrafterGeometry:
    """Taps after layers 0 and 2."""
    return resolve(load_recipe("tiny", tiny_release))


@pytest.mark.parametrize("kind", MAKERS)
def test_features_and_head_are_those_of_transformers(kind, saved, geometry):
    from transformers import AutoModelForCausalLM

    folder = saved(kind)
    assert len(list(folder.glob("*.safetensors"))) > 3
    heard: list[str] = []
    target, head = load_target(str(folder), geometry, CPU, torch.float32, 64, on_progress=heard.append)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(4, 260, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = whole(ids[None], output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer + 1][0] for layer in geometry.target_layer_ids], dim=-1)
    assert torch.allclose(target.features_alone(ids), wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(head.lm_head, whole.get_output_embeddings().weight)
    assert torch.allclose(head.embed(ids), whole.get_input_embeddings()(ids))
    assert (head.lm_head is head.embed_tokens) == (kind in ("llama-tied", "qwen3", "gemma3"))
    assert "GiB/s" in heard[-1]


def test_layers_beyond_the_last_tap_and_other_parts_are_not_read(saved, geometry, monkeypatch):
    read: list[str] = []
    original = weights.read

    def watched(wanted, *rest):
        read.extend(each.name for each in wanted)
        original(wanted, *rest)

    monkeypatch.setattr(weights, "read", watched)
    load_target(str(saved("qwen3.5-multimodal")), geometry, CPU, torch.float32)
    assert {name.split(".")[3] for name in read if ".layers." in name} == {"0", "1", "2"}
    assert not [name for name in read if "visual" in name or name.endswith("language_model.norm.weight")]
    assert "lm_head.weight" in read


def test_weights_take_the_runs_type_but_the_decay_keeps_its_own(saved, geometry, monkeypatch):
    decoders = []
    original = target_loading.build
    monkeypatch.setattr(
        target_loading,
        "build",
        lambda decoder, *rest, **more: decoders.append(decoder) or original(decoder, *rest, **more),
    )
    target, head = load_target(str(saved("qwen3.5-multimodal")), geometry, CPU, torch.bfloat16)
    kept = {
        name.rpartition(".")[2] for name, p in decoders[0].named_parameters() if p.dtype != torch.bfloat16
    }
    assert kept == {"A_log"}
    assert head.lm_head.dtype == torch.bfloat16
    assert target.features_alone(torch.arange(4, 24)).dtype == torch.bfloat16


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def refusal(folder: Path, geometry: DrafterGeometry, **options: Any) -> str:
    with pytest.raises(Refusal) as caught:
        load_target(str(folder), geometry, CPU, torch.float32, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Put all tensors into one file, changed."""
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_folder_that_is_not_whole_is_refused_by_the_part(saved, geometry, tmp_path):
    whole = saved("llama")
    shard = sorted(whole.glob("*.safetensors"))[1]

    missing = copied(whole, tmp_path / "missing")
    (missing / shard.name).unlink()
    assert f"{shard.name} is missing: fetch the model again" in refusal(missing, geometry)

    short = copied(whole, tmp_path / "short")
    data = shard.read_bytes()
    (short / shard.name).write_bytes(data[:-100])
    assert f"has {len(data) - 100:,} of {len(data):,} bytes: fetch it again" in refusal(short, geometry)

    (short / shard.name).write_bytes(b"not a header")
    assert "cannot be read as safetensors" in refusal(short, geometry)

    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    assert "has no weights: the target is read from safetensors" in refusal(bare, geometry)
    (bare / "pytorch_model.bin").touch()
    assert "has only pytorch_model.bin" in refusal(bare, geometry)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            "tensor model.layers.1.mlp.up_proj.weight is missing",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 32)}),
            "model.layers.1.mlp.up_proj.weight has shape [3, 32], config.json asks for [64, 32]",
        ),
        (lambda tensors: tensors.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (lambda tensors: tensors.update({"lm_head.bias": torch.zeros(260)}), "its head has a bias"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "no tensor is called embed_tokens.weight"),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(saved, geometry, tmp_path, change, complaint):
    folder = copied(saved("llama"), tmp_path / "model")
    rewrite(folder, change)
    assert complaint in refusal(folder, geometry)


def test_what_lies_beyond_the_last_tap_may_be_missing(saved, geometry, tmp_path):
    folder = copied(saved("llama"), tmp_path / "model")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.4.mlp.up_proj.weight"))
    target, _ = load_target(str(folder), geometry, CPU, torch.float32)
    assert target.features_alone(torch.arange(3)).shape == (3, geometry.feature_size)


def test_too_little_room_is_told_before_anything_is_read(saved, geometry, monkeypatch):
    monkeypatch.setattr(weights, "free_bytes", lambda device: 10_000)
    monkeypatch.setattr(weights, "read", None)
    assert "its weights take 0.0 GiB, cpu has 0.0 GiB free" in refusal(saved("llama"), geometry)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"layer_types": ["chunked_attention"] * 5},
            "has chunked_attention layers, whose packing is not known",
        ),
        ({"model_type": "gpt2", "n_layer": 2}, "GPT2Model has no"),
        ({"logit_scale": 0.5}, "changes its logits (logit_scale)"),
        ({"model_type": "no-such-model"}, "cannot be loaded"),
    ],
)
def test_models_of_another_make_are_refused(saved, geometry, tmp_path, change, complaint):
    folder = copied(saved("llama"), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert complaint in refusal(folder, geometry)


@pytest.mark.parametrize(("version", "packs"), [("4.57.6", False), ("5.8.3", False), ("5.10.0.dev0", True)])
def test_a_hybrid_is_refused_with_a_transformers_that_ignores_borders(
    saved, geometry, monkeypatch, version, packs
):
    monkeypatch.setattr("transformers.__version__", version)
    load_target(str(saved("llama")), geometry, CPU, torch.float32)
    if packs:
        load_target(str(saved("qwen3.5-multimodal")), geometry, CPU, torch.float32)
        return
    monkeypatch.setattr(weights, "read", None)  # told before anything is read
    said = refusal(saved("qwen3.5-multimodal"), geometry)
    assert f"is a hybrid, and transformers {version} lets packed documents share its state" in said
    assert said.endswith("install transformers>=5.9")


def test_a_staged_copy_is_used_only_when_it_is_whole(saved, tmp_path):
    model = copied(saved("llama"), tmp_path / "model")
    memory = tmp_path / "shm"
    assert weights.staged(model, memory) == model
    copy = copied(model, memory / "model")
    assert weights.staged(model, memory) == copy
    shard = next(copy.glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert weights.staged(model, memory) == model
    shard.write_bytes(data[:-8] + bytes(8))  # as long, but of another model
    assert weights.staged(model, memory) == model
    shard.write_bytes(data)
    assert weights.staged(model, memory) == copy
    (copy / "config.json").write_text((model / "config.json").read_text().replace("32", "33"))
    assert weights.staged(model, memory) == model


def test_whoever_hears_of_the_progress_can_end_the_reading(saved):
    class Enough(Exception):
        pass

    def stop(text: str) -> None:
        raise Enough(text)

    stored = list(weights.index(saved("llama")).values())
    with pytest.raises(Enough, match=r"0\.0 of 0\.0 GiB"):
        weights.read(stored, CPU, lambda each, tensor: None, stop)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_onto_a_gpu_the_same_weights(saved, geometry):
    pytest.importorskip("fla")
    folder = str(saved("llama"))
    device = torch.device("cuda:0")
    target, head = load_target(folder, geometry, device, torch.bfloat16, 64, tokens=512)
    _, expected = load_target(folder, geometry, CPU, torch.bfloat16, 64)
    assert head.embed_tokens.device == device
    assert torch.equal(head.embed_tokens.cpu(), expected.embed_tokens)
    assert torch.equal(head.lm_head.cpu(), expected.lm_head)
    assert target.features_alone(torch.arange(4, 44)).isfinite().all()
