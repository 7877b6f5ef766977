"""Attention and delta rule over packed documents: the fast kernels, and references that cannot leak.

All take tensors without a batch dimension, [T, heads, width], and the row's Layout. A reference runs each
document by itself, so it is right on any device; the fast ones are told the borders.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.packing import Layout

# (q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], row, scale, window) -> [T, Hq, D]; causal; `window`: how many
# tokens a query sees, itself included, or None.
Attention = Callable[[Tensor, Tensor, Tensor, Layout, float, int | None], Tensor]
# (q, k [T, Hk, D] of norm 1, v [T, Hv, E], g fp32 [T, Hv] log decay, beta [T, Hv], row) -> [T, Hv, E]
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Layout], Tensor]


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, row: Layout, scale: float, window: int | None
) -> Tensor:
    """torch's variable-length flash attention: CUDA only, bf16 or fp16, head dim up to 256. Heads are not
    repeated: the kernel shares each key head among its queries."""
    attend, grouped = _varlen()
    borders, longest = row.cu_seqlens, row.longest
    left = -1 if window is None or window >= longest else window - 1
    return attend(q, k, v, borders, borders, longest, longest, scale=scale, window_size=(left, 0), **grouped)


@functools.cache
def _varlen() -> tuple[Callable[..., Tensor], dict[str, bool]]:
    """torch 2.11 takes fewer key heads as they come; later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if grouped else {}


STEP = (
    256  # tokens that lengths are rounded up to: cuDNN plans for 16 lengths then, 50 ms each, not for 4,096
)
LONG = 1024  # tokens of the mean document from which one document at a time fills a large GPU


def long_document_attention(
    q: Tensor, k: Tensor, v: Tensor, row: Layout, scale: float, window: int | None
) -> Tensor:
    """Each long document by itself through torch's scaled dot product, which on Hopper is cuDNN's: 450
    TFLOP/s at head dim 256 on an H200, the packed kernel 310. Rows of short documents, windows, and what
    lies too close to the row's end go to the packed kernel.

    A document's slice is rounded up into the ones after it: no query looks ahead, so its own see nothing
    of them, and theirs are not kept.
    """
    total = len(q)
    if total < LONG * len(row.lengths) or (window is not None and window < row.longest):
        return varlen_attention(q, k, v, row, scale, window)
    out = torch.empty_like(q)
    for number, (first, last) in enumerate(row.spans):
        reach = first - (first - last) // STEP * STEP  # rounded up
        if reach > total:
            rest = replace(
                row,
                lengths=row.lengths[number:],
                longest=max(row.lengths[number:]),
                cu_seqlens=row.cu_seqlens[number:] - first,
            )
            out[first:] = varlen_attention(q[first:], k[first:], v[first:], rest, scale, window)
            break
        parts = [t[first:reach].transpose(0, 1)[None] for t in (q, k, v)]
        seen = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
        out[first:last] = seen[0, :, : last - first].transpose(0, 1)
    return out


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, row: Layout, scale: float, window: int | None
) -> Tensor:
    """Each document by itself through torch's scaled dot product; the largest mask is one document's."""
    out = torch.empty_like(q)
    for first, last in row.spans:
        parts = [t[first:last].transpose(0, 1)[None] for t in (q, k, v)]
        n = last - first
        mask = None
        if window is not None and n > window:
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        seen = F.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out[first:last] = seen[0].transpose(0, 1)
    return out


def fla_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row: Layout) -> Tensor:
    """flash-linear-attention's chunked gated delta rule: value heads are grouped, the state starts anew at
    each border, and the given chunk list keeps it from asking the device for one."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None],
        cu_seqlens=row.cu_seqlens, chunk_indices=row.chunk_indices,
    )  # fmt: skip
    return out[0]


def qla_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row: Layout) -> Tensor:
    """FlashQLA's chunked gated delta rule: bf16 or fp16, heads of 128, Hopper and Blackwell. It shares one
    memo of chunk lists, four long, among all threads and asks the device for what is not in it; told the
    borders it does neither. Its split of long documents (`auto_cp`) would ask, too, and gains nothing here.
    """
    from flash_qla import chunk_gated_delta_rule
    from flash_qla.utils.index import prepare_varlen_metadata

    borders = row.cu_seqlens
    if not hasattr(borders, "_flash_qla_prepared_varlen"):  # once a row; by another name once a layer
        prepare_varlen_metadata(borders, torch.tensor([0, *itertools.accumulate(row.lengths)]))
    out, _ = chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None], cu_seqlens=borders, auto_cp=False
    )
    return out[0]


def document_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row: Layout) -> Tensor:
    """Each document by itself through transformers' reference, which knows no borders."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    reference = inspect.unwrap(torch_chunk_gated_delta_rule)  # a package's kernel may lie over it
    share = v.shape[1] // k.shape[1]  # older references want as many key heads as value heads
    q, k = (t.repeat_interleave(share, dim=1) for t in (q, k))
    out = torch.empty_like(v)
    for first, last in row.spans:
        parts = (t[first:last][None] for t in (q, k, v, g, beta))
        out[first:last] = reference(*parts)[0][0]
    return out


@dataclass(frozen=True)
class Operators:
    """What a target's layers call. trainer.kernels chooses and proves them for a device."""

    attention: Attention
    recurrence: Recurrence


REFERENCE = Operators(document_attention, document_recurrence)
FAST = Operators(varlen_attention, fla_recurrence)
