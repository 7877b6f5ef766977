"""The DFlash draft model, which fills a whole block at once and reads the target only as keys and values.

Parameter names and shapes are those of the published z-lab checkpoints, so export is a copy (paper: arXiv
2602.06036). Embeddings and head are the target's, frozen, and live in target.SharedHead.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.geometry import DrafterGeometry
from trainer.islands import EAGER, Islands
from trainer.masks import Mask
from trainer.products import Matrix, Stack, Storage, attach
from trainer.seeding import generator

Rotary = tuple[Tensor, Tensor]


class Context(NamedTuple):
    """What every layer reads of the target: keys_values, one [T, 2, kv heads, d] a layer, keys first and
    neither normalised nor rotated; rotary, cos and sin [T, d]."""

    keys_values: tuple[Tensor, ...]
    rotary: Rotary


class RMSNorm(nn.Module):
    """A weight and its epsilon; the norm itself is an island."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @property
    def settings(self) -> tuple[Tensor, float]:
        return self.weight, self.eps


class Attention(nn.Module):
    def __init__(self, g: DrafterGeometry) -> None:
        super().__init__()
        self.q_proj = Matrix(g.hidden_size, g.heads * g.head_dim)
        self.k_proj = Matrix(g.hidden_size, g.kv_heads * g.head_dim)
        self.v_proj = Matrix(g.hidden_size, g.kv_heads * g.head_dim)
        self.o_proj = Matrix(g.heads * g.head_dim, g.hidden_size)
        self.q_norm = RMSNorm(g.head_dim, g.rms_norm_eps)
        self.k_norm = RMSNorm(g.head_dim, g.rms_norm_eps)


class MLP(nn.Module):
    def __init__(self, g: DrafterGeometry) -> None:
        super().__init__()
        self.gate_proj = Matrix(g.hidden_size, g.intermediate_size)
        self.up_proj = Matrix(g.hidden_size, g.intermediate_size)
        self.down_proj = Matrix(g.intermediate_size, g.hidden_size)


class Layer(nn.Module):
    def __init__(self, g: DrafterGeometry) -> None:
        super().__init__()
        self.self_attn = Attention(g)
        self.mlp = MLP(g)
        self.input_layernorm = RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.geometry = g
        self.query = Stack(self.self_attn.q_proj)
        self.output = Stack(self.self_attn.o_proj)
        self.gate_up = Stack(self.mlp.gate_proj, self.mlp.up_proj)
        self.down = Stack(self.mlp.down_proj)

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        own: Stack,
        context: tuple[Tensor, Rotary],
        rotary: Rotary,
        mask: Mask,
        ops: Islands,
    ) -> tuple[Tensor, Tensor]:
        """x [Q, H] the block's residual stream, normed [Q, H] this layer's input norm of it, own: the layer's
        keys and values as one product. Returns the stream and what the MLP adds to it: the sum belongs to the
        next norm."""
        g, attention = self.geometry, self.self_attn
        query = self.query(normed).view(-1, g.heads, g.head_dim)
        block = own(normed).view(-1, 2, g.kv_heads, g.head_dim)
        query = ops.queries(query, *attention.q_norm.settings, *rotary)
        key, value = ops.keys_values(context[0], block, *attention.k_norm.settings, context[1], rotary)
        attended = self.output(ops.attend(query, key, value, mask).flatten(1))
        x, normed = ops.add_rms_norm(x, attended, *self.post_attention_layernorm.settings)
        return x, self.down(ops.swiglu(self.gate_up(normed)))


class Drafter(nn.Module):
    """Trained: fc, hidden_norm, the layers, norm. `islands` may be replaced by compiled functions of fixed
    shapes; with `checkpointing` a layer's activations are computed again in backward, not kept."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.fc = Matrix(g.feature_size, g.hidden_size)
        self.hidden_norm = RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(g) for _ in range(g.layers))
        self.norm = RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.islands = EAGER
        self.checkpointing = False
        self.features_in = Stack(self.fc)
        attentions = [layer.self_attn for layer in self.layers]
        # All layers read the same context: one product (27B: of 10,240 rows), one gradient of the context.
        self.keys_values = Stack(*(m for a in attentions for m in (a.k_proj, a.v_proj)))

    def attach(self, device: torch.device, dtype: torch.dtype) -> Storage:
        """Lay the parameters out for training on `device` with products in `dtype`; not to be moved after."""
        stacks = [self.keys_values, self.features_in]
        for layer in self.layers:
            stacks += [layer.query, layer.output, layer.gate_up, layer.down]
        norms = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        return attach(stacks, norms, device, dtype)

    def context(self, features: Tensor, positions: Tensor) -> Context:
        """features [T, K*H], positions int64 [T] from the start of each document: projected and normalised
        once, then the keys and values of all layers."""
        g = self.geometry
        hidden = self.islands.rms_norm(self.features_in(features), *self.hidden_norm.settings)
        all_layers = self.keys_values(hidden).view(-1, g.layers, 2, g.kv_heads, g.head_dim)
        rotary = rotary_tables(positions, g.head_dim, g.rope_theta, features.dtype)
        return Context(all_layers.unbind(1), rotary)

    def forward(
        self, context: Context, block_embeds: Tensor, block_positions: Tensor, masks: dict[str, Mask]
    ) -> Tensor:
        """block_embeds [A*B, H], block_positions int64 [A*B] -> hidden [A*B, H] for the target's head.

        `block_embeds` are the target's embeddings of [anchor, mask x (B-1)] per block; positions count from
        the start of the document; `masks` holds one mask per layer type (masks.build_masks).
        """
        g, ops = self.geometry, self.islands
        rotary = rotary_tables(block_positions, g.head_dim, g.rope_theta, block_embeds.dtype)
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        x, normed = block_embeds, ops.rms_norm(block_embeds, *norms[0].settings)
        for layer, kind, read, own, norm in zip(
            self.layers, g.layer_types, context.keys_values, self.keys_values.parts(2), norms[1:], strict=True
        ):
            arguments = (x, normed, own, (read, context.rotary), rotary, masks[kind], ops)
            if self.checkpointing and torch.is_grad_enabled():
                x, added = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x, added = layer(*arguments)
            x, normed = ops.add_rms_norm(x, added, *norm.settings)
        return normed


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """cos and sin [n, head_dim] over the whole head, computed in fp32: never the target's partial or mRoPE
    variant."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None].float() * theta**-exponent
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def initialise(drafter: Drafter, seed: int) -> None:
    """Matrices from normal(0, 0.02), norms at one; a pure function of `seed` on every device.

    Each matrix has a generator of its own, so that a pool of threads draws them: 1.7 billion numbers take
    ten seconds in one.
    """

    def draw(name: str, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.normal_(0.0, 0.02, generator=generator(seed, "weights", name))

    matrices = [(name, p) for name, p in drafter.named_parameters() if p.dim() == 2]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda named: draw(*named), matrices))


def block_inputs(
    ids: Tensor, positions: Tensor, anchors: Tensor, g: DrafterGeometry
) -> tuple[Tensor, Tensor]:
    """Token ids and positions, int64 [A*B] each, of the blocks [anchor, mask x (B-1)] of one row."""
    slot = torch.arange(g.block_size, device=ids.device)
    tokens = torch.where(slot == 0, ids[anchors][:, None], g.mask_token_id)
    return tokens.flatten(), (positions[anchors][:, None] + slot).flatten()
