"""Where the draft blocks of a row start: drawn anew; fixed ones cost 0.7 tau (paper, 5.64 to 4.94)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.data import Row


@dataclass(frozen=True)
class Blocks:
    """A blocks of one row: anchors int64 [A], rising row indices; valid bool [A], false for padding."""

    anchors: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device) -> Blocks:
        return Blocks(self.anchors.to(device), self.valid.to(device))


def allowed_anchors(row: Row, block_size: int) -> torch.Tensor:
    """bool [T]: a supervised token with a supervised successor and a whole block left inside its document.

    The first token of an answer qualifies (serving starts there); header tokens never do. The successor rule
    leaves out the end token of a turn, after which serving never drafts.
    """
    allowed = torch.zeros_like(row.loss_mask)
    last = len(row.ids) - block_size + 1
    if last > 0:
        same = row.doc_ids[:last] == row.doc_ids[block_size - 1 :]
        allowed[:last] = same & (row.doc_ids[:last] >= 0) & row.loss_mask[:last] & row.loss_mask[1 : last + 1]
    return allowed


def draw_anchors(row: Row, count: int, block_size: int, generator: torch.Generator) -> Blocks:
    """`count` blocks without replacement; rows with fewer allowed anchors are padded with invalid blocks at
    the end."""
    allowed = allowed_anchors(row, block_size).nonzero().flatten()
    chosen = allowed[torch.randperm(len(allowed), generator=generator)[:count]].sort().values
    anchors = torch.full((count,), max(len(row.ids) - block_size, 0), dtype=torch.int64)
    anchors[: len(chosen)] = chosen
    return Blocks(anchors, torch.arange(count) < len(chosen))
