"""A replica on random weights, rows and features, and the drafter written down again, plainly."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.config import DataConfig, DrafterConfig, Recipe, TargetConfig, TrainConfig
from trainer.data import Document, Row, pack
from trainer.geometry import DrafterGeometry
from trainer.replica import Replica
from trainer.target import SharedHead

CPU = torch.device("cpu")
BUDGET, ANCHORS, BLOCK, WINDOW = 128, 32, 4, 6
GEOMETRY = DrafterGeometry(
    hidden_size=32,
    vocab_size=50,
    num_target_layers=4,
    target_layer_ids=(0, 2),
    block_size=BLOCK,
    mask_token_id=49,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,  # what flex attention takes at least on a GPU
    intermediate_size=24,
    layer_types=("sliding_attention", "full_attention", "full_attention"),
    sliding_window=WINDOW,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    eos_token_id=1,
    pad_token_id=0,
)


def replica(device: torch.device = CPU, dtype: torch.dtype = torch.float32, **train: object) -> Replica:
    recipe = Recipe(
        name="random",
        target=TargetConfig(model="none"),
        data=DataConfig(train="", heldout="", budget=BUDGET, max_document=BUDGET),
        drafter=DrafterConfig(block_size=BLOCK),
        train=TrainConfig(**{"steps": 10, "anchors": ANCHORS, "gamma": 4.0, "loss_chunk_blocks": 8, **train}),
    )
    draw = torch.Generator().manual_seed(7)
    embed, head = (
        torch.randn(GEOMETRY.vocab_size, GEOMETRY.hidden_size, generator=draw).to(device, dtype)
        for _ in range(2)
    )
    made = Replica(recipe, GEOMETRY, 0, device, SharedHead(embed, head))
    with torch.no_grad():  # norms away from one, weights large enough that every part of the network speaks
        for parameter in made.drafter.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.empty(parameter.shape).uniform_(0.5, 1.5, generator=draw))
            else:
                parameter.mul_(5.0)
    made.storage.refresh()
    return made


def a_row(index: int) -> tuple[Row, Tensor]:
    """Two to four documents with one or two answers each, and features; all drawn from `index`."""
    draw = torch.Generator().manual_seed(1000 + index)
    lengths = torch.randint(12, 32, (2 + index % 3,), generator=draw).tolist()
    documents = []
    for n in lengths:
        mask = torch.zeros(n, dtype=torch.bool)
        mask[3 : n // 2] = mask[n // 2 + 2 :] = True
        documents.append(Document(torch.randint(2, 49, (n,), generator=draw), mask, ""))
    return pack(documents, BUDGET, index), torch.randn(BUDGET, GEOMETRY.feature_size, generator=draw)


def plain_loss(
    w: dict[str, Tensor], head: SharedHead, row: Row, features: Tensor, anchors: list[int]
) -> Tensor:
    """The paper's loss of one row, block by block: nothing shared, nothing packed, no mask."""
    g, total = GEOMETRY, torch.zeros(())
    for anchor in anchors:
        start = anchor - int(row.positions[anchor])
        context = norm(features[start:anchor] @ w["fc.weight"].T, w["hidden_norm.weight"])
        at = torch.arange(anchor - start, anchor - start + BLOCK)
        slots = torch.tensor([int(row.ids[anchor])] + [g.mask_token_id] * (BLOCK - 1))
        x = head.embed_tokens[slots]
        for i, kind in enumerate(g.layer_types):
            p = {name.removeprefix(f"layers.{i}."): t for name, t in w.items() if f"layers.{i}." in name}
            h = norm(x, p["input_layernorm.weight"])
            both, where = torch.cat([context, h]), torch.cat([torch.arange(anchor - start), at])
            query = turn(heads(h, p, "q"), at)
            key = turn(heads(both, p, "k"), where).repeat_interleave(g.heads // g.kv_heads, 1)
            value = heads(both, p, "v").repeat_interleave(g.heads // g.kv_heads, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(g.head_dim)
            if kind == "sliding_attention":
                ahead = (torch.arange(len(both)) - len(context))[None] > torch.arange(BLOCK)[:, None]
                old = where[None] < at[:, None] - (WINDOW - 1)
                scores = scores.masked_fill(
                    ahead | (old & (torch.arange(len(both)) < len(context))), -math.inf
                )
            out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
            x = x + out @ p["self_attn.o_proj.weight"].T
            h = norm(x, p["post_attention_layernorm.weight"])
            gate, up = (h @ p[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ p["mlp.down_proj.weight"].T
        logits = norm(x, w["norm.weight"]) @ head.lm_head.T
        for k in range(1, BLOCK):
            token = anchor + k
            if token >= BUDGET or row.doc_ids[token] != row.doc_ids[anchor] or not row.loss_mask[token]:
                break
            total = total + math.exp(-(k - 1) / 4.0) * F.cross_entropy(logits[k], row.ids[token])
    return total


def heads(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    out = (x @ p[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, GEOMETRY.head_dim))
    return out if name == "v" else norm(out, p[f"self_attn.{name}_norm.weight"])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, GEOMETRY.rms_norm_eps)


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions over the whole head as complex numbers: halves are real and imaginary parts."""
    d = GEOMETRY.head_dim // 2
    angle = positions[:, None] * GEOMETRY.rope_theta ** (-torch.arange(d) / d)
    turned = torch.complex(x[..., :d], x[..., d:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)
