"""One drafter on one device: everything of a step that needs no other drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import compile_watch, islands, memory
from trainer.anchors import draw_anchors
from trainer.config import Recipe
from trainer.data import Row
from trainer.drafter import Drafter, block_inputs, initialise
from trainer.geometry import DrafterGeometry
from trainer.loss import LossParts, block_loss
from trainer.masks import build_masks
from trainer.optimizer import Optimizer
from trainer.seeding import generator
from trainer.target import SharedHead
from trainer.warm_start import from_target


@dataclass(frozen=True)
class Contribution:
    """What one row brings to a step besides its gradients; contributions add up.

    numbers: float64 [2 + 2(B-1)] on the drafter's device, as LossParts.pack lays them out; tokens: real ones
    in the row.
    """

    numbers: Tensor
    tokens: int


class Replica:
    """Drafter, frozen head and optimizer of rank `rank`."""

    def __init__(
        self, recipe: Recipe, geometry: DrafterGeometry, rank: int, device: torch.device, head: SharedHead
    ) -> None:
        self.recipe, self.geometry, self.rank, self.device, self.head = recipe, geometry, rank, device, head
        self.dtype = head.lm_head.dtype
        self.drafter = Drafter(geometry)
        self.drafter.checkpointing = recipe.train.activation_checkpointing
        initialise(self.drafter, recipe.train.seed)
        if recipe.drafter.init == "target":
            from_target(self.drafter, recipe.target.model)
        self.storage = self.drafter.attach(device, self.dtype)
        self.optimizer = Optimizer(self.drafter, self.storage, recipe.train)

    def gradients(self) -> list[Tensor]:
        """What must be summed over the drafters of a step: fp32, zero where no row came. Slices of one flat
        tensor, because NCCL counts the elements of a call in 32 bits."""
        return list(self.storage.gradients.split(1 << 30))

    def backward(self, row: Row, features: Tensor) -> Contribution:
        """Forward and backward of the loss's numerator on one row; gradients add up in the parameters.

        The row lies on the host, its features [T, K*H] on this device. Nothing waits for the device.
        """
        parts = self._loss(row, features)
        parts.numerator.backward()
        return Contribution(parts.pack(), row.tokens)

    def warm_up(self, row: Row) -> None:
        """Compile every graph that a step uses, forward and backward, and leave no trace in the weights.

        On CUDA this proves that nothing falls back: RuntimeError unless as many graphs were made as there are
        islands (none when warmed up before), and a step takes no more memory than memory.py expects.
        """
        features = torch.zeros(len(row.ids), self.geometry.feature_size, device=self.device, dtype=self.dtype)
        before = compile_watch.graphs()
        self._loss(row, features).numerator.backward()
        if self.device.type == "cuda":
            made, expected = compile_watch.graphs() - before, islands.GRAPHS_PER_DRAFTER
            if made not in (0, expected):
                told = "; ".join(map(str, compile_watch.compiles()[-made:]))
                raise RuntimeError(f"the drafter compiled {made} graphs, expected {expected}: {told}")
            self._prove_memory(row, features)
        self.storage.gradients.zero_()

    def _prove_memory(self, row: Row, features: Tensor) -> None:
        torch.cuda.synchronize(self.device)
        resident = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._loss(row, features).numerator.backward()
        torch.cuda.synchronize(self.device)
        taken = torch.cuda.max_memory_allocated(self.device) - resident
        expected = memory.step_need(self.recipe, self.geometry, self.dtype)
        if taken > expected:
            raise RuntimeError(
                f"a drafter's step took {taken / memory.GIB:.2f} GiB, expected at most "
                f"{expected / memory.GIB:.2f}: something ran dense, or was kept that should not be"
            )

    def _loss(self, row: Row, features: Tensor) -> LossParts:
        train, geometry = self.recipe.train, self.geometry
        size = geometry.block_size
        draw = generator(train.seed, "anchors", row.index)
        blocks = draw_anchors(row, train.anchors, draw, train.anchors_per_document)
        if self.device.type == "cuda":  # a copy from pageable memory would wait for the device
            row, blocks = row.pinned(), blocks.pinned()
        row, blocks = row.to(self.device), blocks.to(self.device)
        tokens, positions = block_inputs(row.ids, row.positions, blocks.anchors, geometry)
        masks = build_masks(
            blocks, row.positions, size, geometry.layer_types, geometry.sliding_window, heads=geometry.heads
        )
        context = self.drafter.context(features.to(self.dtype), row.positions)
        hidden = self.drafter(context, self.head.embed(tokens), positions, masks)
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
