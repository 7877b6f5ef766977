"""A hybrid target from nothing in two minutes, and its own greedy answers: what a drafter learns from.

Everything here is the unmodified Hugging Face class; none of the trainer's code takes part, so that what the
trainer later does with this target can be compared with it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.common import say
from bench.learning_text import AFTER_PROMPT, END, MASK, PAD, Samples, decode, encode

WARM_STEPS = 3  # kernels are tuned in them; the clock and the schedule start afterwards
LOOP_LENGTH, LOOP_COUNT = 8, 4  # text that says the same 8 tokens 4 times is stuck from there on


def new_target(folder: Path, vocabulary: int, device: torch.device) -> Any:
    """A random model of the configuration in `folder`, fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if device.type == "cuda":
        forgo_tuning()
    return model.to(device)


def forgo_tuning() -> None:
    """Let every fla kernel take its first configuration. Trying them all costs a minute, which a run of this
    length never earns back; needs the model's class imported."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for kernel in list(vars(module).values()):
                while isinstance(kernel, KernelInterface):  # decorators lie around one another
                    if isinstance(kernel, Autotuner):
                        kernel.configs = kernel.configs[:1]
                    kernel = kernel.fn


@contextlib.contextmanager
def differentiable_recurrence(device: torch.device) -> Iterator[None]:
    """Qwen3.5's recurrence in plain autograd, by transformers' own function, whatever kernels are installed.

    fla's backward refuses to run on Hopper with Triton 3.4 to 3.7.0, where it is wrong (its issue 640). The
    rule runs in fp32, as it was written, with tf32 products.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    fast = modeling.torch_chunk_gated_delta_rule
    plain = inspect.unwrap(fast)

    def rule(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return plain(*arguments, **options)

    products = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    modeling.torch_chunk_gated_delta_rule = rule
    try:
        yield
    finally:
        modeling.torch_chunk_gated_delta_rule = fast
        torch.set_float32_matmul_precision(products)


def load(folder: Path, device: torch.device) -> Any:
    """The saved target, frozen."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    if device.type == "cuda":
        forgo_tuning()
    return model.to(device).eval().requires_grad_(False)


def pretrain(
    model: Any, samples: Samples, *, steps: int, seconds: float, batch: int, lr: float
) -> dict[str, Any]:
    """Next-token training on whole samples, one per row; ends after `steps` or `seconds`, whichever is first,
    with the learning rate at zero. Products in bf16 on CUDA, weights in fp32."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(samples.ids.astype(numpy.int32)).to(device)
    lengths = torch.from_numpy(samples.lengths).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    draw = torch.Generator().manual_seed(1)
    model.train()
    began, tokens, losses, step, share = time.monotonic(), 0, [], 0, 0.0
    while share < 1.0:
        if step == WARM_STEPS:
            _wait(device)
            say(f"  {WARM_STEPS} warm-up steps: {time.monotonic() - began:.1f} s")
            began, tokens = time.monotonic(), 0
        rate = lr * min(1.0, 20 * share + 0.01) * (1.0 - share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.randint(len(ids), (batch,), generator=draw).to(device)
        with differentiable_recurrence(device):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = _loss(model, ids[rows].long(), lengths[rows])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        tokens += batch * ids.shape[1]
        losses.append(loss.detach())
        if step % 25 == 0 or step == steps:
            _wait(device)
            spent = time.monotonic() - began
            say(f"  step {step:5d}  loss {float(losses[-1]):.3f}  {tokens / spent:,.0f} tok/s  {spent:.0f} s")
        spent = time.monotonic() - began
        share = max(step / steps, spent / seconds if step > WARM_STEPS else 0.0)
    _wait(device)
    spent = time.monotonic() - began
    last = torch.stack(losses[-20:]).mean()
    return {"steps": step, "seconds": spent, "tokens_per_s": tokens / spent, "loss": float(last)}


def _loss(model: Any, ids: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the tokens of each sample but its first; rows are padded at the end, which a causal model
    cannot see."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    labels = ids[:, 1:].clone()
    labels[torch.arange(1, ids.shape[1], device=ids.device) >= lengths[:, None]] = -100
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


@torch.inference_mode()
def answer(model: Any, prompts: Tensor, limit: int) -> Tensor:
    """Greedy answers int64 [n, limit] to prompts of one length [n, P], padded after the end token.

    Equal lengths need no padding, so the recurrent state is that of each prompt alone."""
    from transformers import DynamicCache

    # renamed in transformers 5; the old name goes away in 5.40
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    out = torch.full((len(prompts), limit), PAD, device=prompts.device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    ids = prompts
    for at in range(limit):
        given = {name: cache, "use_cache": True, "logits_to_keep": 1}
        ids = model(input_ids=ids, **given).logits[:, -1].argmax(-1, keepdim=True)
        out[:, at] = torch.where(done, PAD, ids[:, 0])
        done |= ids[:, 0] == END
        if at % 16 == 15 and bool(done.all()):  # a look at the device, so not at every token
            break
    return out


def answers(
    model: Any,
    prompts: Tensor,
    *,
    limit: int,
    batch: int,
    seconds: float,
    ask: Callable[[Any, Tensor, int], Tensor] = answer,
) -> list[list[int]]:
    """Answers to the prompts in turn until they are all answered or `seconds` have passed."""
    found: list[list[int]] = []
    began = time.monotonic()
    for part in prompts.split(batch):
        for row in ask(model, part, limit).tolist():
            found.append(row[: row.index(END) + 1] if END in row else row)
        spent = time.monotonic() - began
        say(f"  {len(found):,} answers in {spent:.1f} s")
        if spent + spent * len(part) / len(found) > seconds:
            break
    return found


def before_the_loop(answer: list[int]) -> list[int]:
    """The answer up to its LOOP_COUNT-th repetition of the same words; small models get stuck."""
    seen: Counter[tuple[int, ...]] = Counter()
    for at in range(len(answer) - LOOP_LENGTH + 1):
        gram = tuple(answer[at : at + LOOP_LENGTH])
        seen[gram] += 1
        if seen[gram] == LOOP_COUNT:
            return answer[:at]
    return answer


@torch.inference_mode()
def agreement(model: Any, prompts: list[list[int]], found: list[list[int]], batch: int) -> dict[str, float]:
    """Share of the answers' tokens, and of whole answers, that one forward over prompt and answer would
    choose as well: cached single steps and a whole forward add in different orders, so near-ties differ."""
    same = tokens = whole = 0
    longest = max(map(len, found))
    for first in range(0, len(found), batch):
        rows = slice(first, first + batch)
        part = [p + a for p, a in zip(prompts[rows], found[rows], strict=True)]
        ids = torch.tensor([row + [PAD] * (len(prompts[0]) + longest - len(row)) for row in part])
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits
        chosen = logits.argmax(-1).tolist()
        for row, after in zip(part, chosen, strict=True):
            agreed = [after[at - 1] == row[at] for at in range(len(prompts[0]), len(row))]
            same, tokens, whole = same + sum(agreed), tokens + len(agreed), whole + all(agreed)
    return {"tokens": same / tokens, "answers": whole / len(found)}


def usable(
    tokenizer: Any, found: list[list[int]], shortest: int
) -> tuple[list[list[int] | None], Counter[str]]:
    """The answers as they may be trained on, None for those that may not, and why those may not."""
    kept: list[list[int] | None] = []
    dropped: Counter[str] = Counter()
    found = [before_the_loop(one) for one in found]
    bodies = [one[: len(one) - (one[-1] == END)] for one in found]
    again = encode(tokenizer, decode(tokenizer, bodies))
    for one, body, same in zip(found, bodies, again, strict=True):
        reason = (
            f"fewer than {shortest} tokens before it ends or repeats itself"
            if len(one) < shortest
            else "special token inside"
            if min(body) <= MASK
            else "its text is not tokenised as it was written"
            if body != same
            else None
        )
        if reason:
            dropped[reason] += 1
        kept.append(None if reason else one)
    return kept, dropped


def conversation(tokenizer: Any, key: str, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """One line of a training file; rendering it gives back these very ids."""
    ended = answer[-1] == END
    text, content = decode(tokenizer, [prompt, answer[: len(answer) - ended]])
    user = text.removeprefix("<|im_start|>user\n").removesuffix(AFTER_PROMPT)
    reply = {"role": "assistant", "content": content} | ({} if ended else {"finish": "length"})
    return {"id": key, "conversations": [{"role": "user", "content": user}, reply]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
