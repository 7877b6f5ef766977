"""Tokens that are made once: a prepared file holds a corpus ready to pack, and refuses another tokenizer.

One safetensors file: `ids` int32 [N] and `mask` uint8 [N] of all documents end to end, `starts` int64 [D+1],
`keys` uint8 (a JSON list of texts); what it was made with stands as JSON under `pctrun` in the header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer import rendering
from trainer.errors import Refusal

SUFFIX = ".safetensors"
_HEADER = "pctrun"


@dataclass(frozen=True)
class Origin:
    """What a prepared file was made from; `dropped` maps a reason to a count of conversations."""

    source: str
    sha256: str
    max_document: int
    tokenizer: str
    template: str
    conversations: int
    cut: int
    dropped: dict[str, int] = field(default_factory=dict)
    rendering: int = rendering.VERSION


@dataclass(frozen=True)
class Prepared:
    """ids int32 [N], mask bool [N], starts int64 [D+1]: document d is ids[starts[d]:starts[d+1]]."""

    ids: torch.Tensor
    mask: torch.Tensor
    starts: torch.Tensor
    keys: list[str]
    origin: Origin


def fingerprints(tokenizer: Any) -> tuple[str, str]:
    """16 hex digits each over how text becomes tokens, and over the chat template.

    Over the tokenizer's meaning, not its file: merges are written in two ways, a use may set padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        state = json.loads(backend.to_str())
        for passing in ("version", "truncation", "padding"):
            state.pop(passing, None)
        merges = state.get("model", {}).get("merges")
        if merges:
            state["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return _digest(json.dumps(state, sort_keys=True)), _digest(tokenizer.get_chat_template())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, prepared: Prepared) -> None:
    """The file appears whole or not at all. Raises Refusal when it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {
        "ids": prepared.ids,
        "mask": prepared.mask.to(torch.uint8),
        "starts": prepared.starts,
        "keys": torch.frombuffer(bytearray(json.dumps(prepared.keys).encode()), dtype=torch.uint8),
    }
    incoming = path.with_name(f".{path.name}.incoming")
    try:
        save_file(tensors, incoming, metadata={_HEADER: json.dumps(asdict(prepared.origin))})
        incoming.chmod(0o644)
        incoming.replace(path)
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{path}: cannot be written ({error})") from None
    finally:
        with contextlib.suppress(OSError):  # gone, or on a file system that is read-only
            incoming.unlink()


def _check_whole(tensors: dict[str, torch.Tensor], keys: Any) -> None:
    """Raises ValueError where the tensors do not fit together: documents would be other texts in silence."""
    ids, mask, starts = (tensors[name] for name in ("ids", "mask", "starts"))
    if ids.dtype != torch.int32 or ids.dim() != 1 or ids.shape != mask.shape:
        raise ValueError("ids and mask do not belong together")
    if len(ids) and int(ids.min()) < 0:
        raise ValueError("a token below 0")
    whole = starts.dim() == 1 and len(starts) > 1 and int(starts[0]) == 0 and int(starts[-1]) == len(ids)
    if not whole or bool((starts.diff() < 1).any()):
        raise ValueError("starts do not divide the ids into documents")
    if not isinstance(keys, list) or len(keys) != len(starts) - 1:
        raise ValueError("not one key a document")


def read(path: Path, tokenizer: Any, max_document: int) -> Prepared:
    """Raises Refusal for a file that is not whole, or was made with another tokenizer, template or rule, or
    cut shorter than `max_document`."""
    from safetensors import SafetensorError, safe_open

    again = "prepare it again: python -m trainer.prepare"
    try:
        with safe_open(path, "pt") as file:
            origin = Origin(**json.loads((file.metadata() or {})[_HEADER]))
            tensors = {name: file.get_tensor(name) for name in ("ids", "mask", "starts", "keys")}
        keys = json.loads(bytes(tensors["keys"].numpy()).decode())
        _check_whole(tensors, keys)
    except KeyError:
        raise Refusal(
            f"{path}: no file of trainer.prepare; data.train and data.heldout name one or jsonl"
        ) from None
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise Refusal(f"{path}: cannot be read ({str(error).splitlines()[0]}); {again}") from None
    for what, was, is_now in zip(
        ("tokenizer", "chat template"),
        (origin.tokenizer, origin.template),
        fingerprints(tokenizer),
        strict=True,
    ):
        if was != is_now:
            raise Refusal(
                f"{path}: made with another {what} than the target's ({was}, now {is_now}); {again}"
            )
    if origin.rendering != rendering.VERSION:
        raise Refusal(f"{path}: made by an earlier rule (version {origin.rendering}); {again}")
    if origin.cut and origin.max_document < max_document:
        raise Refusal(
            f"{path}: {origin.cut} documents were cut at {origin.max_document} tokens, data.max_document is "
            f"{max_document}; {again} --max-document {max_document}"
        )
    return Prepared(tensors["ids"], tensors["mask"].bool(), tensors["starts"], keys, origin)
