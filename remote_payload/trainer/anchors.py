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

    def pinned(self) -> Blocks:
        """In page-locked host memory."""
        return Blocks(self.anchors.pin_memory(), self.valid.pin_memory())

    def to(self, device: torch.device) -> Blocks:
        return Blocks(*(t.to(device, non_blocking=True) for t in (self.anchors, self.valid)))


def allowed_anchors(row: Row) -> torch.Tensor:
    """bool [T]: a supervised token with a supervised successor in its document.

    The first token of an answer qualifies (serving starts there); header tokens never do. The successor rule
    leaves out the end token of a turn, after which serving never drafts. A block may reach beyond its answer
    or its document, as the last one does at every serving: the slots there have no label (`labels`) and see
    what all slots of a block see, nothing of what follows in the row. With a whole block required, the last
    B-1 tokens of every answer would never start one and short answers would teach nothing.
    """
    allowed = torch.zeros_like(row.loss_mask)
    same = row.doc_ids[:-1] == row.doc_ids[1:]
    allowed[:-1] = row.loss_mask[:-1] & row.loss_mask[1:] & same
    return allowed


def draw_anchors(row: Row, count: int, generator: torch.Generator, per_document: int | None = None) -> Blocks:
    """`count` blocks shared out over the row's documents, without replacement; what is left over is invalid
    blocks at the end.

    A document gets slots in proportion to its allowed anchors, at least one and at most `per_document`. Its
    share holds the first token of each answer (all serving starts there), the rest is random. Each anchor of
    a row is thus as likely in a short document as in a long one.
    """
    at = allowed_anchors(row).nonzero().flatten()
    _, which, sizes = row.doc_ids[at].unique_consecutive(return_inverse=True, return_counts=True)
    quotas = torch.tensor(share_out(sizes.tolist(), count, per_document, generator), dtype=torch.int64)
    before = (at - 1).clamp(min=0)
    first = (at == 0) | ~row.loss_mask[before] | (row.doc_ids[before] != row.doc_ids[at])
    # By document, first tokens before the others, both in random order; then each document's first few.
    rank = torch.rand(len(at), generator=generator, dtype=torch.float64) - first.double()
    order = (rank + 2.0 * which).argsort()
    starts = sizes.cumsum(0) - sizes
    taken = torch.arange(len(at)) - starts[which] < quotas[which]  # `which` rises: `order` keeps its runs
    chosen = at[order[taken]].sort().values
    anchors = torch.full((count,), len(row.ids) - 1, dtype=torch.int64)
    anchors[: len(chosen)] = chosen
    return Blocks(anchors, torch.arange(count) < len(chosen))


def share_out(sizes: list[int], count: int, cap: int | None, generator: torch.Generator) -> list[int]:
    """How many of `count` slots each document gets that has `sizes` allowed anchors: largest remainders, one
    at least, `cap` at most. More documents than slots: as many as there are slots, drawn by lot, get one."""
    room = [min(size, cap or size) for size in sizes]
    count = min(count, sum(room))
    if len(sizes) > count:
        lucky = set(torch.randperm(len(sizes), generator=generator)[:count].tolist())
        return [int(d in lucky) for d in range(len(sizes))]
    wanted = [count * size / sum(room) for size in room]
    quotas = [min(max(int(share), 1), most) for share, most in zip(wanted, room, strict=True)]
    while (missing := count - sum(quotas)) != 0:
        step = 1 if missing > 0 else -1
        movable = [d for d, n in enumerate(quotas) if (n < room[d] if step > 0 else n > 1)]
        movable.sort(key=lambda d: step * (quotas[d] - wanted[d]))
        for document in movable[: abs(missing)]:
            quotas[document] += step
    return quotas


def labels(row: Row, blocks: Blocks, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids int64, whether they count bool), [A, B-1] each: slot k is to predict token anchor + k.

    It counts where all tokens from the anchor to it are supervised and of one document: an answer that has
    ended is never drafted on, so tokens of a next turn behind a short question are no labels of this block.
    Row and blocks on the same device.
    """
    reach = blocks.anchors[:, None] + torch.arange(block_size, device=blocks.anchors.device)
    inside = reach < len(row.ids)
    reach = reach.clamp(max=len(row.ids) - 1)
    own = inside & row.loss_mask[reach] & (row.doc_ids[reach] == row.doc_ids[reach[:, :1]])
    return row.ids[reach[:, 1:]], (own.cumprod(1).bool() & blocks.valid[:, None])[:, 1:]
