"""Where each document of a packed row begins and ends, in the forms that attention and recurrence ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import Row

CHUNK = 64  # tokens that fla's delta rule takes at once (its default chunk size)


@dataclass(frozen=True)
class Layout:
    """The documents of one row of T tokens; what pads the row counts as documents of its own.

    lengths: tokens of each, on the host; longest: the largest of them; positions int64 [T], restarting at
    each document; cu_seqlens int32 [N+1], where they begin, T last; seq_idx int32 [1, T], which document a
    token belongs to; chunk_indices int32 [C, 2]: (document, chunk within it) of every chunk of CHUNK tokens.
    No kernel that takes these is compiled for N or C, so neither is padded.
    """

    lengths: tuple[int, ...]
    longest: int
    positions: Tensor
    cu_seqlens: Tensor
    seq_idx: Tensor
    chunk_indices: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Layout:
        """Made on the host and sent without waiting for the device: a row must not stall the one before
        it."""
        sizes = torch.tensor(lengths)
        numbers, chunks = torch.arange(len(sizes)), (sizes + CHUNK - 1) // CHUNK
        chunk_indices = torch.stack([numbers.repeat_interleave(chunks), _within(chunks)], 1)
        return cls(
            lengths=tuple(lengths),
            longest=max(lengths),
            positions=send(_within(sizes), device),
            cu_seqlens=send(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(), device),
            seq_idx=send(numbers.repeat_interleave(sizes)[None].int(), device),
            chunk_indices=send(chunk_indices.int(), device),
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first token, one past the last) of each document, on the host."""
        found, start = [], 0
        for length in self.lengths:
            found.append((start, start + length))
            start += length
        return found


def row_lengths(row: Row) -> list[int]:
    """Document lengths of a row that is still on the host. Padding is cut into pieces no longer than the
    longest document, so that an almost empty row does not cost attention over its whole length."""
    numbers, counts = torch.unique_consecutive(row.doc_ids, return_counts=True)
    lengths = counts.tolist()
    if int(numbers[-1]) != -1:
        return lengths
    padding = lengths.pop()
    piece = max(lengths, default=padding)
    whole, rest = divmod(padding, piece)
    return lengths + [piece] * whole + [rest] * (rest > 0)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without the host waiting for what the device has still to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _within(sizes: Tensor) -> Tensor:
    """0 … size-1 for each size, one after the other."""
    starts = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
