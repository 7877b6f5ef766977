"""The frozen language model, run only to its last tapped layer; packed documents must not feel each other."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data import Document, Row, pack
from trainer.errors import Refusal
from trainer.geometry import DrafterGeometry

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a run reads its folder and nothing else

# A packed row's document mask is T x T booleans; beyond this the row needs variable-length attention.
MASK_LIMIT_BYTES = 1 << 30
# Largest deviation between packed and single documents, relative to the largest feature of the tap.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class SharedHead:
    """The target's frozen embedding and output rows, [V, H] each (one tensor twice if the target ties
    them)."""

    embed_tokens: Tensor
    lm_head: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> SharedHead:
        embed = self.embed_tokens.to(device, dtype)
        return SharedHead(
            embed, embed if self.lm_head is self.embed_tokens else self.lm_head.to(device, dtype)
        )

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens[ids]


class Target:
    """Features of rows and of single documents. Several threads may call it: what a forward taps is per
    thread."""

    def __init__(
        self, decoder: nn.Module, layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device, self.dtype, self.layer_ids = device, dtype, layer_ids
        self._decoder = decoder
        self._taps = threading.local()
        for index in layer_ids:
            decoder.layers[index].register_forward_hook(self._tap)

    def _tap(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        self._taps.outputs.append(output[0] if isinstance(output, tuple) else output)

    @torch.no_grad()
    def _features(self, ids: Tensor, **arguments: Any) -> Tensor:
        self._taps.outputs = []
        self._decoder(input_ids=ids[None].to(self.device), use_cache=False, **arguments)
        features = torch.cat([output[0] for output in self._taps.outputs], dim=-1)
        self._taps.outputs = []
        return features

    def features(self, row: Row) -> Tensor:
        """[T, K*H] of a packed row: the outputs of the tapped layers, each document as if it were alone."""
        wanted = len(row.ids) ** 2
        if wanted > MASK_LIMIT_BYTES:
            raise Refusal(
                f"the document mask of a {len(row.ids):,}-token row would take {wanted:,} bytes, "
                f"the limit is {MASK_LIMIT_BYTES:,}: lower data.budget"
            )
        documents = row.doc_ids.to(self.device)
        mask = (documents[:, None] == documents).tril()
        return self._features(
            row.ids, attention_mask=mask[None, None], position_ids=row.positions[None].to(self.device)
        )

    def features_alone(self, ids: Tensor) -> Tensor:
        """[n, K*H] of one document on the model's own path: no mask and no positions of ours."""
        return self._features(ids)

    def check_packing(self, documents: list[Document], budget: int) -> None:
        """Refuse to go on unless packed features equal those of each document alone; names the layer that
        differs."""
        parts = [Document(d.ids[:64], d.loss_mask[:64], d.key) for d in documents[:3]]
        parts = parts[: max(1, budget // 64)]
        length = min(budget, sum(len(d.ids) for d in parts) + 8)
        packed = self.features(pack(parts, length))
        alone = torch.cat([self.features_alone(d.ids) for d in parts])
        packed = packed[: len(alone)].unflatten(-1, (len(self.layer_ids), -1)).float()
        alone = alone.unflatten(-1, (len(self.layer_ids), -1)).float()
        for tap, layer in enumerate(self.layer_ids):
            worst = float((packed[:, tap] - alone[:, tap]).abs().max() / alone[:, tap].abs().max())
            if not worst <= TOLERANCE[self.dtype]:
                allowed = f"{TOLERANCE[self.dtype]:.0e} in {self.dtype}"
                raise Refusal(
                    f"packed documents change each other: layer {layer} deviates by {worst:.1e} of its "
                    f"largest feature (allowed {allowed}): this target cannot be packed"
                )


def load_target(
    model: str, geometry: DrafterGeometry, device: torch.device, dtype: torch.dtype, max_document: int
) -> tuple[Target, SharedHead]:
    """Read a Hugging Face causal-LM folder from disk, drop what lies beyond the last tap, freeze it.

    Raises Refusal for folders that cannot be read and for models whose packing or head this trainer does not
    honour.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not Path(model).is_dir():
        raise Refusal(f"target model {model}: no such folder; put the model there or set target.model")
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        _check_supported(config.get_text_config(), model, max_document)
        full = AutoModelForCausalLM.from_pretrained(
            model, local_files_only=True, dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        raise Refusal(f"target model {model}: cannot be loaded ({str(error).splitlines()[0]})") from None
    embed, head = full.get_input_embeddings(), full.get_output_embeddings()
    if type(embed) is not nn.Embedding or head.bias is not None:
        raise Refusal(f"target model {model}: its embedding is scaled or its head has a bias; not supported")
    decoder = full.get_decoder()
    last = geometry.target_layer_ids[-1]
    decoder.layers = decoder.layers[: last + 1]
    decoder.config.num_hidden_layers = last + 1
    decoder.norm = nn.Identity()  # the last tap is the residual stream itself, and nothing reads beyond it
    decoder.requires_grad_(False).eval().to(device)
    rows = embed.weight.detach().to(device)
    tied = head.weight is embed.weight
    shared = SharedHead(rows, rows if tied else head.weight.detach().to(device))
    return Target(decoder, geometry.target_layer_ids, device, dtype), shared


def _check_supported(config: Any, model: str, max_document: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise Refusal(
            f"target model {model} has {', '.join(sorted(other))} layers: their state would leak between "
            "packed documents; choose a target with plain attention"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and max_document > window:
        raise Refusal(
            f"target model {model} attends within {window} tokens: "
            f"lower data.max_document from {max_document} to that"
        )
    for name in ("final_logit_softcapping", "logit_scale"):
        if getattr(config, name, None):
            raise Refusal(f"target model {model} changes its logits ({name}): not supported")
