"""What a drafter needs on its card, known before anything is loaded: refused at start, not at the first step.

An upper estimate from the geometry and the recipe alone. What is kept is counted, buffer by buffer, as the
code keeps it (drafter.py, loss.py); kernels' own workspaces and what the allocator cannot use are RESERVE.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch

from trainer.config import Recipe
from trainer.errors import Refusal
from trainer.geometry import DrafterGeometry
from trainer.weights import free_bytes

GIB = 2**30
FP32 = 4
RESERVE = 2 * GIB  # of a card: CUDA context, cuBLAS workspaces, fragments
STEP_SLACK = GIB // 4  # row, masks, rotary tables, what the allocator rounds up
ROWS_AT_A_DRAFTER = 2  # features of the row in work and of the next, already on its way


def drafter_need(recipe: Recipe, g: DrafterGeometry, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one drafter on a card of its own, by what they are for; products in `dtype`."""
    size, train = dtype.itemsize, recipe.train
    parameters = g.parameter_count()
    tokens, slots = recipe.data.budget, train.anchors * g.block_size
    hidden, queries, keys = g.hidden_size, g.heads * g.head_dim, 2 * g.kv_heads * g.head_dim
    # Kept for backward: two sums and their norms (4 H); queries raw and rotated, attended as the kernel and
    # as the product wants them; gate, up and their product; keys and values of the whole row.
    layer = slots * (4 * hidden + 4 * queries + keys + 3 * g.intermediate_size) + (tokens + slots) * keys
    layers = g.layers * layer + 2 * slots * hidden  # the embeddings before, the norm after
    if train.activation_checkpointing:
        layers = layer + (2 * g.layers + 2) * slots * hidden
    drafted = train.anchors * (g.block_size - 1)
    chunk = min(train.loss_chunk_blocks, train.anchors) * (g.block_size - 1)
    return {
        "fp32 weights": FP32 * parameters,
        "gradients": FP32 * parameters,
        "Adam moments": 2 * FP32 * parameters,
        "compute weights": size * parameters if dtype != torch.float32 else 0,
        "embedding and head": 2 * size * g.vocab_size * hidden,
        "features": ROWS_AT_A_DRAFTER * size * tokens * g.feature_size,
        "context": size * tokens * (2 * hidden + g.layers * keys),
        "layers": size * layers,
        "logits of a chunk": 2 * size * chunk * g.vocab_size + 2 * size * drafted * hidden,
    }


def step_need(recipe: Recipe, g: DrafterGeometry, dtype: torch.dtype) -> int:
    """Bytes that come and go with each row, features apart."""
    parts = drafter_need(recipe, g, dtype)
    return STEP_SLACK + sum(parts[name] for name in ("context", "layers", "logits of a chunk"))


def check_drafters(
    recipe: Recipe, g: DrafterGeometry, devices: Sequence[torch.device], dtype: torch.dtype
) -> dict[str, float]:
    """GiB that the drafters will take, by device; Refusal with the mend where one has less free."""
    needed: dict[str, float] = {}
    for device, drafters in Counter(devices).items():
        needed[str(device)] = round(_total(recipe, g, device, dtype, drafters) / GIB, 1)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes(device)
        if free is not None:
            fit(recipe, g, device, dtype, drafters, free)
    return needed


def fit(
    recipe: Recipe, g: DrafterGeometry, device: torch.device, dtype: torch.dtype, drafters: int, free: int
) -> None:
    """Refusal if `drafters` of them need more than `free` bytes on `device`: with the smallest change to the
    recipe that makes them fit."""
    needed = _total(recipe, g, device, dtype, drafters)
    if needed <= free:
        return
    parts = drafter_need(recipe, g, dtype)
    largest = ", ".join(f"{name} {parts[name] / GIB:.1f}" for name in sorted(parts, key=parts.get)[:-4:-1])
    raise Refusal(
        f"{device} has {free / GIB:.1f} GiB free, {drafters} drafter(s) need {needed / GIB:.1f} "
        f"({largest} GiB each): {_mend(recipe, g, device, dtype, drafters, free)}"
    )


def _mend(
    recipe: Recipe, g: DrafterGeometry, device: torch.device, dtype: torch.dtype, drafters: int, free: int
) -> str:
    train = recipe.train

    def fits(**changed: object) -> bool:
        other = dataclasses.replace(recipe, train=dataclasses.replace(train, **changed))
        return _total(other, g, device, dtype, drafters) <= free

    if fits(activation_checkpointing=True):
        return "set train.activation_checkpointing: true"
    anchors = train.anchors // 2
    while anchors >= g.block_size:
        if fits(activation_checkpointing=True, anchors=anchors):
            return f"set train.activation_checkpointing: true and train.anchors: {anchors}"
        anchors //= 2
    return f"lower data.budget, name fewer drafters on {device} in topology, or free it"


def _total(
    recipe: Recipe, g: DrafterGeometry, device: torch.device, dtype: torch.dtype, drafters: int
) -> int:
    """Drafters on one card share the frozen embedding and head, and the reserve."""
    parts = drafter_need(recipe, g, dtype)
    reserve = RESERVE if device.type == "cuda" else 0
    return reserve + drafters * sum(parts.values()) - (drafters - 1) * parts["embedding and head"]
