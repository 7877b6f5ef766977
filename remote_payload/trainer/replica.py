"""One drafter on one device: everything of a step that needs no other drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.anchors import draw_anchors
from trainer.config import Recipe
from trainer.data import Row
from trainer.drafter import Drafter, block_inputs, initialise
from trainer.exchange import checksum
from trainer.geometry import DrafterGeometry
from trainer.loss import LossParts, block_loss
from trainer.masks import build_masks
from trainer.optimizer import Optimizer
from trainer.seeding import generator
from trainer.target import SharedHead
from trainer.warm_start import from_target

CHECKSUM_EVERY = 20  # steps between two proofs that all drafters hold the same weights


@dataclass(frozen=True)
class Contribution:
    """What one drafter brings to a step besides its gradients: host numbers, summed over ranks by the
    pipeline."""

    numerator: float
    denominator: float
    correct: list[int]
    counted: list[int]
    tokens: int
    weights: int | None


class Replica:
    """Drafter, frozen head and optimizer of rank `rank`."""

    def __init__(
        self, recipe: Recipe, geometry: DrafterGeometry, rank: int, device: torch.device, head: SharedHead
    ) -> None:
        self.recipe, self.geometry, self.rank, self.device, self.head = recipe, geometry, rank, device, head
        self.dtype = head.lm_head.dtype
        drafter = Drafter(geometry)
        initialise(drafter, recipe.train.seed)
        if recipe.drafter.init == "target":
            from_target(drafter, recipe.target.model)
        self.drafter = drafter.to(device)
        self.optimizer = Optimizer(self.drafter, recipe.train)

    def backward(self, row: Row, features: Tensor, step: int) -> Contribution:
        """Forward and backward of the loss's numerator on one row; the gradients stay in the parameters."""
        weights = checksum(self.drafter) if step % CHECKSUM_EVERY == 0 else None
        parts = self._loss(row, features, step)
        parts.numerator.backward()
        return Contribution(
            float(parts.numerator.detach()),
            float(parts.denominator),
            parts.correct.tolist(),
            parts.counted.tolist(),
            row.tokens,
            weights,
        )

    def warm_up(self, row: Row) -> None:
        """Compile every graph that a step uses, forward and backward, and leave no trace in the weights."""
        features = torch.zeros(len(row.ids), self.geometry.feature_size, device=self.device, dtype=self.dtype)
        self._loss(row, features, step=0).numerator.backward()
        self.drafter.zero_grad(set_to_none=True)

    def _loss(self, row: Row, features: Tensor, step: int) -> LossParts:
        train, geometry = self.recipe.train, self.geometry
        size = geometry.block_size
        draw = generator(train.seed, "anchors", step, self.rank)
        blocks = draw_anchors(row, train.anchors, size, draw).to(self.device)
        row = row.to(self.device)
        tokens, positions = block_inputs(row.ids, row.positions, blocks.anchors, geometry)
        masks = build_masks(
            blocks, row.positions, size, geometry.layer_types, geometry.sliding_window, heads=geometry.heads
        )
        context = self.drafter.context(features.to(self.dtype))
        hidden = self.drafter(context, self.head.embed(tokens), row.positions, positions, masks)
        return block_loss(
            hidden,
            row,
            blocks,
            self.head.lm_head,
            block_size=size,
            gamma=train.gamma,
            chunk_blocks=train.loss_chunk_blocks,
            islands=self.drafter.islands,
        )
