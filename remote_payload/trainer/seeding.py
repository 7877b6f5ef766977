"""Every random choice is a pure function of named numbers, so that resume needs the step and nothing else."""

from __future__ import annotations

import hashlib

import torch


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator that depends on `parts` alone, e.g. (seed, "anchors", step, drafter); equal on every
    device."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
