"""What each part of one layer costs at full size, and what the alternatives to it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.common import clock, say, table
from trainer import target_islands
from trainer.data import Row
from trainer.packed_ops import Operators
from trainer.packing import Layout, row_lengths
from trainer.target_layers import DeltaMixer, Layer, Product, RowState, SoftmaxMixer, read_layer


def measure(
    decoder: nn.Module, config: Any, row: Row, device: torch.device, dtype: torch.dtype, kernels: Operators
) -> None:
    """Print milliseconds of every part of a delta layer and an attention layer, with rate or bandwidth."""
    layers = [read_layer(layer, config) for layer in decoder.layers[:4]]
    layout = Layout.of(row_lengths(row), device)
    islands = target_islands.fused() if device.type == "cuda" else target_islands.EAGER
    hidden = decoder.embed_tokens(row.ids.to(device)).detach()
    positions = layout.positions.expand(3, 1, -1)
    cos, sin = (t[0] for t in decoder.rotary_emb(hidden, positions))
    state = RowState(layout, cos, sin, islands, kernels.attention, kernels.recurrence)
    rows: list[tuple[str, str, str, str]] = []

    def timed(name: str, call: Callable[[], Any], flops: float = 0.0, bytes_: float = 0.0) -> None:
        with torch.no_grad():
            seconds = clock(call, device, repeats=5, warmup=2)
        rate = f"{flops / seconds / 1e12:.0f} TFLOP/s" if flops else ""
        width = f"{bytes_ / seconds / 1e12:.2f} TB/s" if bytes_ else ""
        rows.append((name, f"{seconds * 1e3:.2f}", rate, width))

    with torch.no_grad():
        for layer in (next(x for x in layers if isinstance(x.mixer, kind)) for kind in _kinds(layers)):
            _layer(layer, hidden, state, timed)
    table(("part", "ms", "products", "memory"), rows)
    delta = next((x for x in layers if isinstance(x.mixer, DeltaMixer)), None)
    if delta is not None and device.type == "cuda":
        _convolutions(delta, hidden, state)


def _kinds(layers: list[Layer]) -> list[type]:
    return list(dict.fromkeys(type(layer.mixer) for layer in layers))


def _layer(layer: Layer, hidden: Tensor, state: RowState, timed: Callable[..., None]) -> None:
    mixer, islands, unit = layer.mixer, state.islands, hidden.nbytes
    norm = layer.before_mlp
    normed = islands.norm(hidden, norm.weight, norm.eps, norm.centred, False)

    def product(name: str, made: Product, x: Tensor) -> Tensor:
        timed(f"{name} {list(made.weight.shape)}", lambda: made(x), flops=2 * len(x) * made.weight.numel())
        return made(x)

    if isinstance(mixer, DeltaMixer):
        say("delta layer first, then attention layer")
        projected = product("delta in", mixer.inputs, normed)
        arguments = (
            projected, mixer.convolution, state.layout.positions, mixer.a_log, mixer.dt_bias,
            mixer.key_heads, mixer.key_dim, mixer.value_heads, mixer.value_dim,
        )  # fmt: skip
        given = islands.delta_inputs(*arguments)
        timed("delta_inputs island", lambda: islands.delta_inputs(*arguments), bytes_=2 * _bytes(given))
        assert state.recurrence is not None
        timed("recurrence", lambda: state.recurrence(*given, state.layout))
        read = state.recurrence(*given, state.layout)
        ending = (read, projected, mixer.norm.weight, mixer.norm.eps, len(mixer.convolution), False)
        timed("delta_output island", lambda: islands.delta_output(*ending), bytes_=3 * read.nbytes)
        ready = islands.delta_output(*ending)
    elif isinstance(mixer, SoftmaxMixer):
        ready = _attention(mixer, normed, state, timed, product)
    product("mixer out", mixer.output, ready)
    total = hidden.clone()
    timed(
        "mixer out, summed in place",
        lambda: mixer.output.added(total, ready),
        flops=2 * len(ready) * mixer.output.weight.numel(),
    )
    summed = (hidden, normed, norm.weight, norm.eps, norm.centred, False)
    timed("add_norm island", lambda: islands.add_norm(*summed), bytes_=4 * unit)
    gate_up = product("gate and up", layer.gate_up, normed)
    timed("swiglu island", lambda: islands.swiglu(gate_up, False), bytes_=1.5 * gate_up.nbytes)
    product("down", layer.down, islands.swiglu(gate_up, False))


def _attention(
    mixer: SoftmaxMixer,
    normed: Tensor,
    state: RowState,
    timed: Callable[..., None],
    product: Callable[..., Tensor],
) -> Tensor:
    islands, heads, size = state.islands, mixer.heads, mixer.head_dim
    projected = product("attention in", mixer.inputs, normed)
    q_norm, k_norm = mixer.q_norm, mixer.k_norm
    arguments = (
        projected, state.cos, state.sin, q_norm and q_norm.weight, k_norm and k_norm.weight,
        q_norm.eps if q_norm else 0.0, q_norm.centred if q_norm else False,
        heads, mixer.kv_heads, size, mixer.gated,
    )  # fmt: skip
    query, key = islands.attention_inputs(*arguments)
    moved = 2 * (query.nbytes + key.nbytes)
    timed("attention_inputs island", lambda: islands.attention_inputs(*arguments), bytes_=moved)
    value = projected[:, -mixer.kv_heads * size :].unflatten(1, (mixer.kv_heads, size))
    given = (query, key, value, state.layout, mixer.scale, mixer.window)
    pairs = sum(n * n / 2 for n in state.layout.lengths)
    timed("attention", lambda: state.attention(*given), flops=4 * pairs * heads * size)
    seen = state.attention(*given)
    ending = (seen, projected, mixer.gated, False)
    timed("gate_output island", lambda: islands.gate_output(*ending), bytes_=3 * seen.nbytes)
    return islands.gate_output(*ending)


def _convolutions(layer: Layer, hidden: Tensor, state: RowState) -> None:
    """The island against what packages offer for the same: convolution, split and normalisation."""
    mixer, row = layer.mixer, state.layout
    assert isinstance(mixer, DeltaMixer)
    projected = mixer.inputs(hidden)
    channels, keys = len(mixer.convolution), mixer.key_heads * mixer.key_dim

    def by_fla() -> list[Tensor]:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.l2norm import l2norm_fwd

        parts = []
        for first, last in ((0, keys), (keys, 2 * keys), (2 * keys, channels)):
            part, _ = causal_conv1d(
                projected[None, :, first:last], mixer.convolution[first:last], activation="silu",
                cu_seqlens=row.cu_seqlens, chunk_indices=row.chunk_indices,
            )  # fmt: skip
            parts.append(part[0])
        heads = [part.unflatten(1, (mixer.key_heads, mixer.key_dim)) for part in parts[:2]]
        return [l2norm_fwd(part)[0] for part in heads] + parts[2:]

    def by_causal_conv1d() -> list[Tensor]:
        from causal_conv1d import causal_conv1d_fn

        mixed = causal_conv1d_fn(
            projected[:, :channels].t()[None], mixer.convolution, seq_idx=row.seq_idx, activation="silu"
        )[0].t()
        return [part.contiguous() for part in mixed.split((keys, keys, channels - 2 * keys), dim=1)]

    def by_island() -> list[Tensor]:
        return list(
            state.islands.delta_inputs(
                projected, mixer.convolution, row.positions, mixer.a_log, mixer.dt_bias,
                mixer.key_heads, mixer.key_dim, mixer.value_heads, mixer.value_dim,
            )[:3]
        )  # fmt: skip

    with torch.no_grad():
        wanted = by_island()
        for name, call in (("island", by_island), ("fla", by_fla), ("causal-conv1d", by_causal_conv1d)):
            try:
                found = call()
                seconds = clock(call, projected.device, repeats=5, warmup=2)
            except (ImportError, RuntimeError) as error:
                say(f"convolution by {name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
                continue
            apart = float((found[2].flatten() - wanted[2].flatten()).abs().max())
            say(f"convolution by {name}: {seconds * 1e3:.2f} ms, values apart by {apart:.1e}")


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
