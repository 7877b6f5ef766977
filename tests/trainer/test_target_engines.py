"""Every kind of target against transformers' unmodified model: same features, alone and packed."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.nn import functional as F

from trainer import fp8, target_islands, target_layers
from trainer.data import Document, pack
from trainer.errors import Refusal
from trainer.packed_ops import FAST, REFERENCE
from trainer.target import Target, build, deviations, lean_engine

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HYBRID = COMMON | {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
LEAN = {
    "llama": ("LlamaConfig", COMMON),
    "llama with biases": ("LlamaConfig", COMMON | {"attention_bias": True, "head_dim": 24}),
    "mistral": ("MistralConfig", COMMON | {"sliding_window": 20}),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen3": (
        "Qwen3Config",
        COMMON | {"head_dim": 32, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", HYBRID),
}
MODULES = {
    "gemma3": (
        "Gemma3TextConfig",
        COMMON | {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 32,
                  "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "phi3": ("Phi3Config", COMMON | {"sliding_window": None}),
    "olmo2": ("Olmo2Config", COMMON),
}  # fmt: skip
LAYERS = (0, 1, 3)
ROUNDING = 5e-4  # of fp32 through four layers, for the worst token


def model(kind: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32):
    import transformers

    torch.manual_seed(0)
    name, values = (LEAN | MODULES)[kind]
    config = getattr(transformers, name)(**values)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in made.parameters():  # norms and convolutions that do something, biases that are not zero
        if parameter.dim() != 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return made.to(device, dtype)


def documents(*lengths: int) -> list[Document]:
    draw = torch.Generator().manual_seed(0)
    return [
        Document(torch.randint(3, 300, (n,), generator=draw), torch.ones(n, dtype=torch.bool), str(n))
        for n in lengths
    ]


def own_states(whole, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        outputs = whole.model(ids[None].to(whole.device), output_hidden_states=True)
    states = outputs.hidden_states
    return torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)


def target(whole, kernels=REFERENCE) -> Target:
    parameter = next(whole.parameters())
    return build(cut(whole), LAYERS, parameter.device, parameter.dtype, kernels)


def cut(whole):
    """What a loader hands over: no layer beyond the last tap, no final norm. (Four layers: none to cut.)"""
    decoder = copy.deepcopy(whole.model)
    decoder.norm = torch.nn.Identity()
    return decoder


@pytest.mark.parametrize("kind", [*LEAN, *MODULES])
def test_features_are_transformers_own_alone_and_packed(kind):
    whole = model(kind)
    whole.model.norm = torch.nn.Identity()  # transformers applies it to the last hidden state only
    parts = documents(70, 7, 130)
    wanted = torch.cat([own_states(whole, part.ids) for part in parts])
    made = target(whole)
    alone = torch.cat([made.features_alone(part.ids) for part in parts])
    packed = made.features(pack(parts, 256))
    assert packed.shape == (256, 3 * 64) and packed.dtype == torch.float32
    assert max(deviations(alone, wanted, 3)) < ROUNDING
    assert max(deviations(packed[: len(wanted)], wanted, 3)) < ROUNDING
    made.check_packing(parts, 256)


def test_known_families_take_the_lean_path():
    for kind in LEAN:
        assert target_layers.is_lean(model(kind).model, model(kind).config), kind
    for kind in MODULES:
        assert not target_layers.is_lean(model(kind).model, model(kind).config), kind


def test_fused_weights_replace_the_modules_own_and_leave_them_working():
    whole = model("qwen3.5")
    decoder = cut(whole)
    before = {name: value.clone() for name, value in decoder.named_parameters()}
    build(decoder, LAYERS, CPU, torch.float32, REFERENCE)
    after = dict(decoder.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    mlp, attention = decoder.layers[0].mlp, decoder.layers[3].self_attn
    storage = {p.untyped_storage().data_ptr() for p in (mlp.gate_proj.weight, mlp.up_proj.weight)}
    assert len(storage) == 1, "the parts lie in one tensor"
    assert attention.q_proj.weight.untyped_storage().nbytes() == 4 * 64 * (4 * 64 + 2 * 2 * 32)


@pytest.mark.parametrize("kind", ["qwen3.5", "llama"])
def test_a_leak_is_found_and_its_layer_named(kind, monkeypatch):
    """The operators of the tapped layers are made to ignore the borders: the first of them is named."""
    whole = model(kind)
    made = target(whole)
    from trainer.packing import Layout

    def borderless(cls, lengths, device):
        return original([sum(lengths)], device)

    original = Layout.of
    monkeypatch.setattr(Layout, "of", classmethod(borderless))
    with pytest.raises(Refusal, match=r"packed documents change each other: layer 0 deviates by"):
        made.check_packing(documents(80, 90, 75), 256)


def test_only_the_delta_net_leaks(monkeypatch):
    """Attention that honours the borders does not excuse a state that crosses them."""

    def leaking(q, k, v, g, beta, row):
        from trainer.packing import Layout

        return REFERENCE.recurrence(q, k, v, g, beta, Layout.of([len(q)], CPU))

    from trainer.packed_ops import Operators

    made = target(model("qwen3.5"), Operators(REFERENCE.attention, leaking))
    with pytest.raises(Refusal, match="packed documents change each other: layer 0"):
        made.check_packing(documents(80, 90, 75), 256)


def test_a_check_needs_no_long_documents():
    made = target(model("llama"))
    made.check_packing(documents(1), 16)
    made.check_packing(documents(5, 300, 300, 300), 4)


def test_attention_that_does_more_than_attend_is_refused():
    import transformers

    config = transformers.Gemma2Config(**COMMON, head_dim=32, sliding_window=20, query_pre_attn_scalar=32)
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(Refusal, match="Gemma2Attention also wants softcap"):
        target(whole).features_alone(documents(9)[0].ids)


def test_eight_bit_is_refused_where_it_cannot_be():
    with pytest.raises(Refusal, match="fp8 needs a CUDA device"):
        build(cut(model("llama")), LAYERS, CPU, torch.float32, REFERENCE, precision="fp8")


def test_eight_bit_is_refused_for_widths_that_the_device_cannot_multiply():
    import transformers

    config = transformers.LlamaConfig(**COMMON | {"intermediate_size": 100})
    decoder = transformers.AutoModel.from_config(config)
    with pytest.raises(Refusal, match="a product of the target is 200 wide, no multiple of 16"):
        lean_engine(decoder, LAYERS, REFERENCE, eight_bit=True)


def test_the_eight_bit_path_stays_close_to_the_exact_one():
    """On a CPU its products are computed from the 8-bit values in fp32: the rounding is the real one."""
    whole = model("qwen3.5")
    parts = documents(70, 7, 130)
    row = pack(parts, 256)
    exact = target(whole).features(row)
    eight_bit = Target(
        lean_engine(cut(whole), LAYERS, REFERENCE, eight_bit=True), LAYERS, CPU, torch.float32, REFERENCE, 0.3
    )
    found = eight_bit.features(row)
    cosine = F.cosine_similarity(*(t.unflatten(-1, (3, -1)) for t in (found, exact)), dim=-1)[:207]
    assert cosine[:, 0].median() > 0.99 and cosine.mean() > 0.9, (cosine.mean(0), cosine.median(0))
    assert cosine.max() < 0.99999, "nothing was rounded"
    eight_bit.check_packing(parts, 256)


def test_scaled_rows_keep_their_size_and_zero_stays_zero():
    rows = torch.randn(5, 64) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 3.0])[:, None]
    values, scale = fp8.scaled(rows)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (5, 1)
    error = (values.float() * scale - rows).abs().amax(-1)
    assert (error <= rows.abs().amax(-1) / 16).all()


def test_compiled_islands_are_whole_graphs_one_each_and_compile_no_more():
    """Whatever the number of layers, and never for another length; two targets share none. What inductor
    makes of the graphs is compared on a GPU, by `warm_up` itself."""
    row = pack(documents(70, 7, 130), 256)
    counters = torch._dynamo.utils.counters["stats"]
    for _ in range(2):
        made = target(model("qwen3.5"))
        eager = made.features(row)
        before = counters["unique_graphs"]
        made._compile(row, target_islands.compiled("eager"))
        assert counters["unique_graphs"] - before == len(target_islands.Islands.__dataclass_fields__)
        assert max(deviations(made.features(row), eager, 3)) < ROUNDING
        assert counters["unique_graphs"] - before == len(target_islands.Islands.__dataclass_fields__)
        made.features(pack(documents(200, 3), 256))
        made.features_alone(documents(77)[0].ids)
        assert counters["unique_graphs"] - before == len(target_islands.Islands.__dataclass_fields__)


def test_a_compiled_island_that_computes_something_else_is_named():
    """Only at the first token of each document, in one of many outputs: the rest would hide it."""

    def late(projected, convolution, positions, *others):
        return target_islands.delta_inputs(projected, convolution, positions + 1, *others)

    made = target(model("qwen3.5"))
    row = pack(documents(70, 7, 130), 256)
    wrong = dataclasses.replace(target_islands.EAGER, delta_inputs=late)
    with pytest.raises(Refusal, match="the compiled island delta_inputs deviates from the eager one"):
        made._features(row.ids, [70, 7, 130, 49], target_islands.proven(wrong))
    right = made._features(row.ids, [70, 7, 130, 49], target_islands.proven(target_islands.EAGER))
    assert torch.equal(right, made.features(row))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3.5"])
def test_on_a_gpu_the_engine_rounds_no_worse_than_transformers(kind):
    """Packed and compiled in bf16, judged by transformers' model in fp32, as is transformers' bf16."""
    whole = model(kind).to(torch.bfloat16).to("cuda", torch.float32)
    parts = documents(70, 7, 130)
    whole.model.norm = torch.nn.Identity()
    exact = torch.cat([own_states(whole, part.ids) for part in parts])
    whole = whole.to(torch.bfloat16)
    own = torch.cat([own_states(whole, part.ids) for part in parts])
    made = target(whole, FAST)
    row = pack(parts, 256)
    made.warm_up(row)
    made.check_packing(parts, 256)
    allowed = 1.3 * error(own, exact)
    for found in (made.features(row)[: len(exact)], torch.cat([made.features_alone(p.ids) for p in parts])):
        assert error(found, exact) < allowed


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_eight_bit_product_is_the_one_computed_from_its_values():
    x, weight = fp8.scaled(torch.randn(96, 64)), fp8.scaled(torch.randn(48, 64))
    there = [fp8.Scaled(*(t.cuda() for t in pair)) for pair in (x, weight)]
    found = fp8.product(*there, None, torch.bfloat16)
    exact = fp8.product(x, weight, None, torch.float32)
    assert torch.allclose(found.cpu().float(), exact, atol=0.05, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_eight_bit_path_runs_packed_and_compiled():
    whole = model("qwen3.5").to("cuda", torch.bfloat16)
    parts = documents(70, 7, 130)
    row = pack(parts, 256)
    exact = target(whole, FAST).features(row)
    made = build(cut(whole), LAYERS, whole.device, torch.bfloat16, FAST, precision="fp8")
    made.warm_up(row)
    made.check_packing(parts, 256)
    cosine = F.cosine_similarity(
        *(t.float().unflatten(-1, (3, -1)) for t in (made.features(row), exact)), dim=-1
    )
    cosine = cosine[:207]
    assert cosine[:, 0].median() > 0.99 and cosine.mean() > 0.9, (cosine.mean(0), cosine.median(0))
