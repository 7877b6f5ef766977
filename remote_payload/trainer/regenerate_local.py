"""Answers from a model in this process: exact greedy tokens, each one checked. For examples, not for corpora.

A conversation is kept only if rendering it gives back the generated ids, token for token. Batches are fixed
by the order of the prompts, so a resumed run writes what an undisturbed one would have.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.prompts import Conversation, append, dropped_path, finished_ids
from trainer.rendering import Conversation as Rendering
from trainer.rendering import Dropped, Renderer

LOOP_LENGTH, LOOP_COUNT = 8, 4  # an answer that says the same 8 tokens 4 times is stuck


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], limit: int, ends: set[int]) -> list[list[int]]:
    """Greedy answers to prompts of any lengths, as ids; each ends with one of `ends` or has `limit` ids.

    Left padding keeps the newest tokens aligned; a finished row leaves the batch and its part of the cache.
    """
    from transformers import DynamicCache

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    # renamed in transformers 5; the old name goes away in 5.40
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    answers: list[list[int]] = [[] for _ in prompts]

    def done(answer: list[int]) -> bool:
        return answer[-1] in ends or len(answer) == limit

    rows = list(range(len(prompts)))
    while rows:
        kwargs = {"attention_mask": mask, "position_ids": positions, name: cache, "logits_to_keep": 1}
        chosen = model(input_ids=ids, **kwargs).logits[:, -1].argmax(-1)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            answers[row].append(token)
        going = [i for i, row in enumerate(rows) if not done(answers[row])]
        if going and len(going) < len(rows):
            cache.batch_select_indices(torch.tensor(going))
        rows = [rows[i] for i in going]
        ids = chosen[going, None]
        mask = torch.cat([mask[going], torch.ones_like(ids)], dim=1)
        positions = positions[going, -1:] + 1
    return answers


def answer_all(model: Any, tokenizer: Any, batch: list[Conversation], limit: int) -> None:
    """Fill `messages` and `seen` of every conversation, turn by turn."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for turn in range(max(len(one.turns) for one in batch)):
        asked = [one for one in batch if turn < len(one.turns)]
        prompts = []
        for one in asked:
            one.messages += one.turns[turn]
            text = tokenizer.apply_chat_template(one.messages, tokenize=False, add_generation_prompt=True)
            prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        for one, prompt, answer in zip(asked, prompts, greedy(model, prompts, limit, ends), strict=True):
            one.seen.append((prompt, answer))
            cut = answer[-1] not in ends
            content = tokenizer.decode(answer if cut else answer[:-1], clean_up_tokenization_spaces=False)
            one.messages.append(
                {"role": "assistant", "content": content} | ({"finish": "length"} if cut else {})
            )


def fault(tokenizer: Any, one: Conversation) -> str | None:
    """Why a conversation is no good example, or None."""
    for _, answer in one.seen:
        if len(answer) < 2:
            return "empty answer"
        if set(answer[:-1]) & set(tokenizer.all_special_ids):
            return "special token inside an answer"
        grams = Counter(tuple(answer[i : i + LOOP_LENGTH]) for i in range(len(answer) - LOOP_LENGTH + 1))
        if grams and grams.most_common(1)[0][1] >= LOOP_COUNT:
            return "repeats itself"
    try:
        documents = Renderer(tokenizer).documents(Rendering(one.key, one.messages))
    except Dropped as reason:
        return str(reason)
    if len(documents) > 1:
        return "the chat template rewrites earlier turns"
    ids, mask = documents[0].ids, documents[0].mask
    generated = [token for _, answer in one.seen for token in answer]
    if [token for token, written in zip(ids, mask, strict=True) if written] != generated:
        return "its text gives other tokens back"
    if any(ids[: len(prompt)] != prompt for prompt, _ in one.seen):
        return "its prompt is rendered differently later"
    return None


@torch.inference_mode()
def differs(model: Any, one: Conversation) -> bool:
    """Whether one unbatched pass prefers another token anywhere, as a near tie can that batching resolved."""
    prompt, answer = one.seen[-1]
    ids = torch.tensor([prompt + answer])
    best = model(input_ids=ids).logits[0].argmax(-1)
    return any(
        best[len(prompt) - 1 + i] != token for prompt, answer in one.seen for i, token in enumerate(answer)
    )


def regenerate(
    model: Any, tokenizer: Any, prompts: list[Conversation], out: Path, args: argparse.Namespace
) -> Iterator[str]:
    """Answer what is still missing, batch by batch; yields a line of progress after each.

    Stops early once `args.keep` conversations are kept (None: never)."""
    drops = dropped_path(out)
    kept, dropped = finished_ids(out), finished_ids(drops)
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    todo = [batch for batch in batches if any(one.key not in kept | dropped for one in batch)]
    began, tokens = time.monotonic(), 0
    for number, batch in enumerate(todo, 1):
        if args.keep is not None and len(kept) >= args.keep:
            return
        answer_all(model, tokenizer, batch, args.max_new_tokens)
        good, bad = [], []
        for one in batch:
            tokens += sum(len(answer) for _, answer in one.seen)
            if one.key in kept | dropped:
                continue
            reason = fault(tokenizer, one)
            if reason is None and args.verify and differs(model, one):
                reason = "a single pass prefers another token"
            if reason:
                bad.append({"id": one.key, "reason": reason})
            else:
                good.append(one.line())
        if args.keep is not None:
            good = good[: args.keep - len(kept)]
        append(out, good)
        append(drops, bad)
        kept |= {item["id"] for item in good}
        dropped |= {item["id"] for item in bad}
        spent = time.monotonic() - began
        left = spent / number * (len(todo) - number)
        yield (
            f"{len(kept) + len(dropped)}/{len(prompts)} prompts, {len(dropped)} dropped, "
            f"{tokens / spent:.0f} tokens/s, about {left / 60:.0f} min left"
        )
