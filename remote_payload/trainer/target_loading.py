"""From a model folder to a target on each device: only what runs is read, once, and nothing is guessed.

The text decoder is built without storage, cut after the last tap, and filled tensor by tensor; a multimodal
model's other parts, its later layers and its final norm never leave the disk. Further devices get each tensor
from the first: between GPUs a copy takes a hundredth of what reading takes.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import weights
from trainer.errors import Refusal, last_line
from trainer.geometry import DrafterGeometry
from trainer.kernel_roles import layer_kinds
from trainer.kernels import LONGEST, TOKENS, prove
from trainer.target import SharedHead, Target, build
from trainer.weights import Stored

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a run reads its folder and nothing else

FLOATS = {"BF16", "F16", "F32", "F64"}  # narrower ones are quantised: their scales lie in other tensors
PACKED_DELTA_NET = (5, 9)  # the first transformers whose delta net is told where documents begin
# What serving engines keep as the checkpoint has it whatever their dtype: rounding it to bf16 would change
# how fast each head forgets.
AS_STORED = ("A_log",)
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


def load_target(
    model: str,
    geometry: DrafterGeometry,
    device: torch.device,
    dtype: torch.dtype,
    *given: Any,
    **options: Any,
) -> tuple[Target, SharedHead]:
    """`load_targets` for one device."""
    (target,), head = load_targets(model, geometry, [device], dtype, *given, **options)
    return target, head


def load_targets(
    model: str,
    geometry: DrafterGeometry,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    max_document: int = LONGEST,
    *,
    tokens: int = TOKENS,
    precision: str | None = None,
    allow_slow_kernels: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Target], SharedHead]:
    """Prove the kernels for rows of `tokens`, then read a causal-LM folder up to the last tap, frozen: a
    target for each of `devices`, all different.

    The head's tensors lie on the first. Raises Refusal before anything is read: a folder or a tensor that is
    missing or not what the configuration says, a model that cannot be packed or whose head this trainer does
    not honour, slow kernels that were not allowed, too little room.
    """
    config, tied = _configuration(model)
    _check_supported(config, model)
    proofs = []
    for device in devices:
        if device.type == "cuda":
            on_progress(f"trying the kernels on {device}: two minutes when nothing is compiled yet")
        proof = prove(config, device, dtype, tokens=tokens, longest=max_document)
        for line in proof.lines:
            on_progress(f"{device}: {line}" if len(devices) > 1 else str(line))
        proof.require_fast(allow_slow_kernels)
        proofs.append(proof)
    folder = weights.staged(Path(model))
    if folder != Path(model):
        on_progress(f"reading the copy in {folder}")
    layers = geometry.target_layer_ids[-1] + 1
    decoders = {device: skeleton(config, model, layers, dtype) for device in devices}
    head = _fill(decoders, weights.index(folder), tied, model, dtype, on_progress)
    targets = []
    for (device, decoder), proof in zip(decoders.items(), proofs, strict=True):
        restore_buffers(decoder, device)
        targets.append(build(decoder, geometry.target_layer_ids, device, dtype, proof, precision=precision))
    embed = decoders[devices[0]].embed_tokens
    rows = embed.weight.data
    return targets, SharedHead(rows, rows if head is None else head, _embed_scale(embed, config, model))


def _configuration(model: str) -> tuple[Any, bool]:
    """The language model's configuration, and whether its head is its embedding."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not Path(model).is_dir():
        raise Refusal(f"target model {model}: no such folder; put the model there or set target.model")
    try:
        whole = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise Refusal(f"target model {model}: cannot be loaded ({last_line(error)})") from None
    return whole.get_text_config(decoder=True), bool(getattr(whole, "tie_word_embeddings", False))


def _check_supported(config: Any, model: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise Refusal(f"target model {model} is an encoder-decoder: a drafter needs a causal language model")
    if "linear_attention" in layer_kinds(config):
        import transformers

        if tuple(map(int, transformers.__version__.split(".")[:2])) < PACKED_DELTA_NET:
            raise Refusal(
                f"target model {model} is a hybrid, and transformers {transformers.__version__} lets packed "
                "documents share its state: install transformers>=5.9"
            )
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 0, 1):
            raise Refusal(f"target model {model} changes its logits ({name}): not supported")


def skeleton(config: Any, model: str, layers: int, dtype: torch.dtype) -> nn.Module:
    """The text decoder with its first `layers` layers, without storage and without a final norm."""
    from transformers import AutoModel

    cut = copy.deepcopy(config)
    if getattr(cut, "layer_types", None):
        cut.layer_types = cut.layer_types[:layers]
    cut.num_hidden_layers = layers
    try:
        with torch.device("meta"):
            decoder = AutoModel.from_config(cut, dtype=dtype)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, ArithmeticError) as error:
        raise Refusal(
            f"target model {model}: config.json asks for the impossible ({last_line(error)})"
        ) from None
    parts = ("embed_tokens", "layers", "rotary_emb")
    if absent := [name for name in parts if not hasattr(decoder, name)]:
        raise Refusal(
            f"target model {model}: {type(decoder).__name__} has no {absent[0]}: only decoders of the Llama "
            "family's layout are supported"
        )
    if hasattr(decoder, "norm"):
        decoder.norm = nn.Identity()  # the last tap is the residual stream itself; nothing reads beyond it
    return decoder.requires_grad_(False).eval()


def _fill(
    decoders: dict[torch.device, nn.Module],
    stored: dict[str, Stored],
    tied: bool,
    model: str,
    dtype: torch.dtype,
    on_progress: Callable[[str], None],
) -> Tensor | None:
    """Give every parameter of each device's decoder its tensor; returns the head's rows [V, H] on the first,
    None if they are the embedding's."""
    first, *others = decoders
    slots = decoders[first].state_dict()
    prefix = _prefix(stored, list(slots), model)
    plan = {prefix + name: name for name in slots}
    head_name = _head(stored, tied, model)
    wanted = [stored[name] for name in (*plan, *([head_name] if head_name else []))]
    for each in wanted:
        shape = slots[plan[each.name]].shape if each.name in plan else slots["embed_tokens.weight"].shape
        if tuple(shape) != each.shape:
            raise Refusal(
                f"target model {model}: {each.name} has shape {list(each.shape)}, config.json asks for "
                f"{list(shape)}"
            )
        if each.dtype not in FLOATS:
            raise Refusal(
                f"target model {model}: {each.name} is stored as {each.dtype}, a quantised checkpoint: take "
                "the bf16 one (target.precision: fp8 makes fast products of it)"
            )
    for device in decoders:
        _check_room([each for each in wanted if device == first or each.name in plan], model, device, dtype)
    head: list[Tensor] = []

    def put(each: Stored, tensor: Tensor) -> None:
        keep = each.name.endswith(AS_STORED) or not tensor.is_floating_point()
        tensor = tensor if keep else tensor.to(dtype)
        if not weights.finite(tensor):
            raise Refusal(f"target model {model}: {each.name} has NaN or infinite values: fetch it again")
        if each.name == head_name:
            head.append(tensor)
            return
        _assign(decoders[first], plan[each.name], tensor)
        for device in others:
            _assign(decoders[device], plan[each.name], tensor.to(device, copy=True))

    weights.read(wanted, first, put, on_progress)
    for device in others:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return head[0] if head else None


def _prefix(stored: dict[str, Stored], slots: list[str], model: str) -> str:
    """What the checkpoint writes before the decoder's own names, such as `model.language_model.`"""
    anchor = "embed_tokens.weight"
    prefixes = [name.removesuffix(anchor) for name in stored if f".{name}".endswith(f".{anchor}")]
    if not prefixes:
        raise Refusal(f"target model {model}: no tensor is called {anchor}: not a causal language model")
    prefix = max(prefixes, key=lambda each: sum(each + slot in stored for slot in slots))
    if absent := [prefix + slot for slot in slots if prefix + slot not in stored]:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise Refusal(
            f"target model {model}: tensor {absent[0]}{more} is missing: fetch the model again, or it is "
            "laid out in a way that this trainer does not read"
        )
    return prefix


def _head(stored: dict[str, Stored], tied: bool, model: str) -> str | None:
    """The name of the head's tensor, None where it is the embedding."""
    if any(name.endswith("lm_head.bias") for name in stored):
        raise Refusal(f"target model {model}: its head has a bias, which drafters do not have: not supported")
    found = next((name for name in HEADS if name in stored), None)
    if found is None and not tied:
        raise Refusal(f"target model {model}: tensor {HEADS[0]} is missing, and config.json does not tie it")
    return None if tied else found


def _check_room(wanted: list[Stored], model: str, device: torch.device, dtype: torch.dtype) -> None:
    """Sizes as they will lie on the device; most checkpoints are stored in bf16."""
    needed = sum(math.prod(each.shape) for each in wanted) * dtype.itemsize
    free = weights.free_bytes(device)
    if free is not None and needed > free:
        gib = 2**30
        raise Refusal(
            f"target model {model}: its weights take {needed / gib:.1f} GiB, {device} has {free / gib:.1f} "
            "GiB free: free the device, or take a smaller target"
        )


def _assign(decoder: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = decoder.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


@torch.no_grad()
def restore_buffers(decoder: nn.Module, device: torch.device) -> None:
    """Compute what no checkpoint holds (rotary frequencies, an embedding's scale) as the model's own
    initialisation does. Raises Refusal when a buffer is left without a value."""
    for parameter in decoder.parameters():
        parameter._is_hf_initialized = True  # transformers' mark: leave it as it is
    for module in decoder.modules():
        empty = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in empty:
            like = module._buffers[name]
            nothing = float("nan") if like.is_floating_point() else 0
            module._buffers[name] = torch.full_like(like, nothing, device=device)
        if empty:
            decoder._init_weights(module)
        for name in empty:
            if module._buffers[name].isnan().any():
                raise Refusal(
                    f"{type(module).__name__}.{name} is in no checkpoint, and transformers does not compute "
                    "it: this target is not supported"
                )


def _embed_scale(embed: nn.Module, config: Any, model: str) -> float:
    """What the target multiplies its embedding with before the first layer."""
    if type(embed) is nn.Embedding:
        return float(getattr(config, "embedding_multiplier", None) or 1.0)
    scale = getattr(embed, "embed_scale", None)
    if scale is None:
        raise Refusal(f"target model {model}: its embedding is a {type(embed).__name__}: not supported")
    return float(scale)
