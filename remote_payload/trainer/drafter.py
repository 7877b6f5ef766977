"""The DFlash draft model, which fills a whole block at once and reads the target only as keys and values.

Parameter names and shapes are those of the published z-lab checkpoints, so export is a copy (paper: arXiv
2602.06036). Embeddings and head are the target's, frozen, and live in target.SharedHead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.geometry import DrafterGeometry
from trainer.islands import EAGER, Islands
from trainer.masks import Mask
from trainer.seeding import generator


class Linear(nn.Linear):
    """Products run in the type of the input; the weight stays the fp32 master."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """A weight and its epsilon; the norm itself is an island."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps


class Attention(nn.Module):
    def __init__(self, g: DrafterGeometry) -> None:
        super().__init__()
        self.q_proj = Linear(g.hidden_size, g.heads * g.head_dim, bias=False)
        self.k_proj = Linear(g.hidden_size, g.kv_heads * g.head_dim, bias=False)
        self.v_proj = Linear(g.hidden_size, g.kv_heads * g.head_dim, bias=False)
        self.o_proj = Linear(g.heads * g.head_dim, g.hidden_size, bias=False)
        self.q_norm = RMSNorm(g.head_dim, g.rms_norm_eps)
        self.k_norm = RMSNorm(g.head_dim, g.rms_norm_eps)
        self.head_dim = g.head_dim

    def forward(
        self, block: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask, ops: Islands
    ) -> Tensor:
        """block [Q, H] (normalised), context [S, H] (as it is); keys and values come from [context;
        block]."""

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

        both = torch.cat([context, block])
        query = ops.rms_norm(split(self.q_proj(block)), self.q_norm.weight, self.q_norm.eps)
        key = ops.rms_norm(split(self.k_proj(both)), self.k_norm.weight, self.k_norm.eps)
        cos, sin = rotary
        at = len(context)
        query, key = rotate(query, cos[at:], sin[at:]), rotate(key, cos, sin)
        out = ops.attend(query, key, split(self.v_proj(both)), mask)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self, g: DrafterGeometry) -> None:
        super().__init__()
        self.gate_proj = Linear(g.hidden_size, g.intermediate_size, bias=False)
        self.up_proj = Linear(g.hidden_size, g.intermediate_size, bias=False)
        self.down_proj = Linear(g.intermediate_size, g.hidden_size, bias=False)

    def forward(self, x: Tensor, ops: Islands) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, g: DrafterGeometry) -> None:
        super().__init__()
        self.self_attn = Attention(g)
        self.mlp = MLP(g)
        self.input_layernorm = RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(g.hidden_size, g.rms_norm_eps)

    def forward(
        self, block: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask, ops: Islands
    ) -> Tensor:
        first, second = self.input_layernorm, self.post_attention_layernorm
        block = block + self.self_attn(
            ops.rms_norm(block, first.weight, first.eps), context, rotary, mask, ops
        )
        return block + self.mlp(ops.rms_norm(block, second.weight, second.eps), ops)


class Drafter(nn.Module):
    """Trained: fc, hidden_norm, the layers, norm. `islands` may be replaced by compiled functions of fixed
    shapes."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.fc = Linear(g.feature_size, g.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(g) for _ in range(g.layers))
        self.norm = RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.islands = EAGER

    def context(self, features: Tensor) -> Tensor:
        """features [T, K*H] -> [T, H]: projected and normalised once; every layer reads the same tensor."""
        return self.islands.rms_norm(self.fc(features), self.hidden_norm.weight, self.hidden_norm.eps)

    def forward(
        self,
        context: Tensor,
        block_embeds: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        masks: dict[str, Mask],
    ) -> Tensor:
        """context [T, H], block_embeds [A*B, H], positions int64 [T] and [A*B] -> hidden [A*B, H] for the
        target's head.

        `block_embeds` are the target's embeddings of [anchor, mask x (B-1)] per block; positions count from
        the start of the document; `masks` holds one mask per layer type (masks.build_masks).
        """
        g = self.geometry
        rotary = rotary_tables(
            torch.cat([context_positions, block_positions]), g.head_dim, g.rope_theta, context.dtype
        )
        x = block_embeds
        for layer, kind in zip(self.layers, g.layer_types, strict=True):
            x = layer(x, context, rotary, masks[kind], self.islands)
        return self.islands.rms_norm(x, self.norm.weight, self.norm.eps)


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [n, head_dim] over the whole head, computed in fp32: never the target's partial or mRoPE
    variant."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None].float() * theta**-exponent
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [heads, n, d], halves convention."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def initialise(drafter: Drafter, seed: int) -> None:
    """Matrices from normal(0, 0.02), norms at one; a pure function of `seed` on every device."""
    draw = generator(seed, "weights")
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=draw))


def block_inputs(
    ids: Tensor, positions: Tensor, anchors: Tensor, g: DrafterGeometry
) -> tuple[Tensor, Tensor]:
    """Token ids and positions, int64 [A*B] each, of the blocks [anchor, mask x (B-1)] of one row."""
    slot = torch.arange(g.block_size, device=ids.device)
    tokens = torch.where(slot == 0, ids[anchors][:, None], g.mask_token_id)
    return tokens.flatten(), (positions[anchors][:, None] + slot).flatten()
