"""The DFlash loss: cross-entropy of each draft slot through the frozen head, never holding all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.anchors import Blocks, labels
from trainer.data import Row
from trainer.islands import EAGER, Islands


@dataclass(frozen=True)
class LossParts:
    """Sums over one row; those of several rows add up, so that their mean is exact.

    numerator (carries the gradient), denominator: fp32 scalars; correct, counted: int64 [B-1], by slot.
    """

    numerator: Tensor
    denominator: Tensor
    correct: Tensor
    counted: Tensor

    def pack(self) -> Tensor:
        """float64 [2 + 2(B-1)] on the same device: numerator, denominator, correct, counted. No host sync."""
        heads = torch.stack([self.numerator.detach(), self.denominator])
        return torch.cat([heads.double(), self.correct.double(), self.counted.double()])


def slot_weights(block_size: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """w_k = exp(-(k-1)/gamma) for k = 1 … B-1, fp32 [B-1]: an early miss ends the accepted prefix (paper,
    A.1)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32, device=device) / gamma)


def block_loss(
    hidden: Tensor,
    row: Row,
    blocks: Blocks,
    lm_head: Tensor,
    *,
    block_size: int,
    gamma: float,
    chunk_blocks: int,
    islands: Islands = EAGER,
) -> LossParts:
    """hidden [A*B, H] after the final norm, lm_head [V, H] frozen; row and blocks on hidden's device.

    Slot k of the block at anchor a predicts token a+k, where that counts (anchors.labels). Slot 0 is the
    anchor.
    """
    wanted, counts = labels(row, blocks, block_size)
    weights = counts * slot_weights(block_size, gamma, hidden.device)
    drafted = hidden.view(-1, block_size, hidden.shape[-1])[:, 1:].reshape(-1, hidden.shape[-1])
    numerator, correct = _HeadCrossEntropy.apply(
        drafted,
        lm_head,
        wanted.flatten(),
        weights.flatten(),
        chunk_blocks * (block_size - 1),
        islands.cross_entropy,
    )
    return LossParts(numerator, weights.sum(), (correct.view_as(counts) & counts).sum(0), counts.sum(0))


class _HeadCrossEntropy(torch.autograd.Function):
    """sum of weight x cross-entropy over [n] slots, `chunk` slots of logits at a time.

    The head is frozen, so the gradient of each chunk's hidden states is known as soon as its logits are: it
    is taken in the forward pass and scaled in the backward one. Two products with the head, where recomputing
    needs three.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, labels: Tensor, weights: Tensor, chunk: int, island: Any
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=hidden.device)
        won = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ lm_head.T
            loss, won[part], d_logits = island(logits, labels[part], weights[part])
            total += (loss * weights[part]).sum()
            if gradient is not None:
                gradient[part] = d_logits @ lm_head
            del logits, d_logits  # or the next chunk's logits would be a third of that size at once
        ctx.gradient = gradient
        ctx.mark_non_differentiable(won)
        return total, won

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient * d_total.to(ctx.gradient.dtype), None, None, None, None, None
