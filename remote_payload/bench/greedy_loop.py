"""Greedy speculative decoding for real, sharing nothing with the trainer, so that its figures can be checked.

The drafter is read from the z-lab folder (names, rotary rule and masks written here a second time, from the
format's description), drafts a block, the target verifies it, the agreeing prefix and one token of the
target's own are committed. Nothing is cached and nothing rolled back: the target runs on the whole prefix in
every cycle, which is right for recurrent layers too.

All sequences share one buffer of fixed shape, filled with zeros past each one's end. The target is causal, so
what follows a position never changes it, and as every forward has the same shape the kernels add in the same
order: greedy text and committed text may be compared token by token, in bf16 too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

# ids int64 [N, L] -> (the target's next token after each position [N, L], tapped features [N, L, K*H]);
# token ids live on the CPU, features where the target runs
Forward = Callable[[Tensor], tuple[Tensor, Tensor]]
# (features [N, L, K*H], tokens before each anchor [N], anchors [N]) -> drafted tokens [N, B-1]
Draft = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Answer:
    """`ids` starts with the token that prefill gives; `cycles` counts the verified drafts after it."""

    ids: list[int]
    cycles: int


def tau(answers: Sequence[Answer]) -> float:
    """Mean over answers of committed tokens per cycle, the target's own token included; NaN without one."""
    rates = [(len(answer.ids) - 1) / answer.cycles for answer in answers if answer.cycles]
    return sum(rates) / len(rates) if rates else float("nan")


def causal_lm(model: Any, layer_ids: Sequence[int]) -> Forward:
    """The forward of an unmodified Hugging Face causal LM; features are the outputs of `layer_ids`."""
    layers = model.get_decoder().layers

    @torch.no_grad()
    def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
        taps: list[Tensor] = []

        def keep(layer: Any, arguments: Any, output: Any) -> None:
            taps.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layers[i].register_forward_hook(keep) for i in layer_ids]
        try:
            logits = model(input_ids=ids.to(model.device), use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits.argmax(-1).cpu(), torch.cat(taps, dim=-1)

    return forward


def greedy(
    target: Forward, prompts: Sequence[Sequence[int]], limits: Sequence[int], end: int, length: int
) -> list[list[int]]:
    """The target's own answers, one forward per token; each ends with `end` or has its limit of tokens."""
    buffer = _Buffer(prompts, limits, end, length)
    while buffer.open():
        after, _ = target(buffer.ids)
        following = after.gather(1, buffer.last()).tolist()
        for row in buffer.open():
            buffer.commit(row, following[row])
    return buffer.answers


def speculate(
    target: Forward,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    end: int,
    length: int,
) -> list[Answer]:
    """Answers by drafting and verifying; `length` must hold prompt, limit and a block of drafts."""
    buffer = _Buffer(prompts, limits, end, length)
    cycles = [0] * len(prompts)
    after, features = target(buffer.ids)
    for row, following in enumerate(after.gather(1, buffer.last()).tolist()):
        buffer.commit(row, following)
    while going := buffer.open():
        anchors = buffer.last()
        drafted = draft(features, anchors[:, 0], buffer.ids.gather(1, anchors)[:, 0])
        slots = anchors + torch.arange(1, drafted.shape[1] + 1)
        slots = slots.clamp(max=length - 1)  # only rows that are done can be so far
        after, features = target(buffer.ids.scatter(1, slots, drafted))
        verified = after.gather(1, torch.cat([anchors, slots], dim=1)).tolist()
        proposals = drafted.tolist()
        for row in going:
            cycles[row] += 1
            agreed = 0
            while agreed < len(proposals[row]) and proposals[row][agreed] == verified[row][agreed]:
                agreed += 1
            buffer.commit(row, [*proposals[row][:agreed], verified[row][agreed]])
    return [Answer(ids, count) for ids, count in zip(buffer.answers, cycles, strict=True)]


class _Buffer:
    """ids int64 [N, length] with each prompt and what was committed after it."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], end: int, length: int
    ) -> None:
        self._prompts = [list(prompt) for prompt in prompts]
        self._limits, self._end = limits, end
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.ids = torch.zeros(len(prompts), length, dtype=torch.int64)
        for row, prompt in enumerate(self._prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt)

    def open(self) -> list[int]:
        """Rows whose answer has neither ended nor reached its limit."""
        return [
            row
            for row, answer in enumerate(self.answers)
            if not answer or (answer[-1] != self._end and len(answer) < self._limits[row])
        ]

    def last(self) -> Tensor:
        """int64 [N, 1]: where each row's newest token stands."""
        at = [len(p) + len(a) - 1 for p, a in zip(self._prompts, self.answers, strict=True)]
        return torch.tensor(at)[:, None]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Append until the end token or the limit."""
        answer = self.answers[row]
        for token in tokens:
            self.ids[row, len(self._prompts[row]) + len(answer)] = token
            answer.append(token)
            if token == self._end or len(answer) == self._limits[row]:
                break


class ServedDrafter:
    """A z-lab checkpoint as a server runs it: full and sliding layers, context read as keys and values only.

    `config` is the folder's config.json, `weights` its tensors, `embed` and `head` [V, H] are the target's.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], embed: Tensor, head: Tensor):
        self.config, self.weights, self.embed, self.head = config, weights, embed, head
        self.block_size: int = config["block_size"]
        self.layer_ids: list[int] = config["dflash_config"]["target_layer_ids"]

    @classmethod
    def load(cls, folder: Path, embed: Tensor, head: Tensor) -> ServedDrafter:
        """Weights take the device and type of `embed`."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        return cls(config, {name: w.to(embed) for name, w in weights.items()}, embed, head)

    @torch.no_grad()
    def __call__(self, features: Tensor, before: Tensor, anchors: Tensor) -> Tensor:
        """See Draft. Features from `before` on are of no meaning yet and are masked out."""
        config, rows, length = self.config, len(anchors), features.shape[1]
        size, device = self.block_size, features.device
        before, anchors = before.to(device), anchors.to(device)
        context = self._norm(self._linear(features.to(self.embed.dtype), "fc"), "hidden_norm")
        tokens = torch.full((rows, size), config["dflash_config"]["mask_token_id"], device=device)
        tokens[:, 0] = anchors
        at = before[:, None] + torch.arange(size, device=device)
        keys_at = torch.cat([torch.arange(length, device=device).expand(rows, -1), at], dim=1)
        visible = {kind: self._visible(kind, before, length) for kind in set(config["layer_types"])}
        x = self.embed[tokens]
        for number, kind in enumerate(config["layer_types"]):
            name = f"layers.{number}"
            block = self._norm(x, f"{name}.input_layernorm")
            x = x + self._attend(f"{name}.self_attn", block, context, at, keys_at, visible[kind])
            block = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(block, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        return (self._norm(x, "norm")[:, 1:] @ self.head.T).argmax(-1).cpu()

    def _visible(self, kind: str, before: Tensor, length: int) -> Tensor:
        """bool [N, 1, B, L + B]: committed context, and the block itself; a sliding layer is causal in the
        block and looks back over its window."""
        size, device = self.block_size, before.device
        position = torch.arange(length, device=device)
        context = (position < before[:, None])[:, None].expand(-1, size, -1)
        slot = torch.arange(size, device=device)
        own = torch.ones(size, size, dtype=torch.bool, device=device)
        if kind == "sliding_attention":
            oldest = before[:, None] + slot - (self.config["sliding_window"] - 1)
            context = context & (position >= oldest[..., None])
            own = own.tril()
        return torch.cat([context, own.expand(len(before), -1, -1)], dim=2)[:, None]

    def _attend(
        self, name: str, block: Tensor, context: Tensor, at: Tensor, keys_at: Tensor, visible: Tensor
    ) -> Tensor:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)

        both = torch.cat([context, block], dim=1)
        query = self._norm(heads(self._linear(block, f"{name}.q_proj")), f"{name}.q_norm")
        key = self._norm(heads(self._linear(both, f"{name}.k_proj")), f"{name}.k_norm")
        value = heads(self._linear(both, f"{name}.v_proj"))
        groups = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(
            self._rotate(query, at),
            self._rotate(key, keys_at).repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            attn_mask=visible,
        )
        return self._linear(out.transpose(1, 2).flatten(2), f"{name}.o_proj")

    def _rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Plain rotary positions over the whole head, halves convention, angles in fp32."""
        half = self.config["head_dim"] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        speed = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = (at[..., None].float() * speed)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return (wide * scale).to(x.dtype) * self.weights[f"{name}.weight"]
