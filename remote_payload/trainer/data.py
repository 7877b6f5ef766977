"""Conversations become packed rows in an order that the seed alone decides, so resume needs no cursor."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.errors import Refusal
from trainer.seeding import generator

# First-fit looks at this many rows: the fill stays above 95 % and packing is linear in the number of
# documents.
_OPEN_ROWS = 64


@dataclass(frozen=True)
class Document:
    """One conversation. ids int64 [n]; loss_mask bool [n], true on what the assistant wrote; key: its
    `id`."""

    ids: torch.Tensor
    loss_mask: torch.Tensor
    key: str


@dataclass(frozen=True)
class Row:
    """Documents side by side in a fixed budget of T tokens, padded at the end.

    ids, positions int64 [T] (positions restart at each document), loss_mask bool [T], doc_ids int32 [T] (-1:
    padding); tokens: how many are real; index: its place in the order of the whole training.
    """

    index: int
    ids: torch.Tensor
    loss_mask: torch.Tensor
    doc_ids: torch.Tensor
    positions: torch.Tensor
    tokens: int

    def pinned(self) -> Row:
        """In page-locked host memory, from where `to` does not wait for the device."""
        fields = (self.ids, self.loss_mask, self.doc_ids, self.positions)
        return Row(self.index, *(t.pin_memory() for t in fields), self.tokens)

    def to(self, device: torch.device) -> Row:
        fields = (self.ids, self.loss_mask, self.doc_ids, self.positions)
        return Row(self.index, *(t.to(device, non_blocking=True) for t in fields), self.tokens)


@dataclass
class Corpus:
    """What a file gave: the documents, and how many conversations were dropped for which reason."""

    documents: list[Document]
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line for the log."""
        tokens = sum(len(d.ids) for d in self.documents)
        supervised = sum(int(d.loss_mask.sum()) for d in self.documents)
        share = supervised / max(tokens, 1)
        line = f"{len(self.documents):,} documents, {tokens:,} tokens, {share:.0%} supervised"
        return line + "".join(
            f"; dropped {count}: {reason}" for reason, count in sorted(self.dropped.items())
        )


def load_tokenizer(model: str) -> Any:
    """The target's own tokenizer, from its folder alone."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise Refusal(f"target model {model}: no tokenizer there ({str(error).splitlines()[0]})") from None
    if not tokenizer.chat_template:
        raise Refusal(
            f"target model {model}: its tokenizer has no chat template; add chat_template.jinja there"
        )
    return tokenizer


def load_corpus(path: Path, tokenizer: Any, *, max_document: int, min_supervised: int = 1) -> Corpus:
    """Read jsonl lines `{"id", "conversations": [{"role", "content"}]}`; a malformed line is refused with
    file:line."""
    corpus = Corpus([])
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand in a text
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: not UTF-8 at byte {error.start}: convert it") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        key, messages = _conversation(line, f"{path}:{number}")
        try:
            ids, mask = render(tokenizer, messages)
        except ValueError as reason:
            corpus.dropped[str(reason)] += 1
            continue
        ids, mask = ids[:max_document], mask[:max_document]
        if int(mask.sum()) < min_supervised:
            corpus.dropped[f"fewer than {min_supervised} supervised tokens"] += 1
            continue
        corpus.documents.append(Document(ids, mask, key))
    if not corpus.documents:
        reasons = (
            "; ".join(f"{count}: {reason}" for reason, count in corpus.dropped.items()) or "the file is empty"
        )
        raise Refusal(f"{path}: no usable conversation ({reasons})")
    return corpus


def _conversation(line: str, place: str) -> tuple[str, list[dict[str, str]]]:
    shape = 'write {"id": "…", "conversations": [{"role": "user", "content": "…"}, …]}'
    try:
        item = json.loads(line)
    except ValueError as error:
        raise Refusal(f"{place}: not JSON ({error}); {shape}") from None
    if (
        not isinstance(item, dict)
        or not isinstance(item.get("conversations"), list)
        or not item["conversations"]
    ):
        raise Refusal(f'{place}: no list "conversations"; {shape}')
    for turn, message in enumerate(item["conversations"]):
        for name in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(name), str):
                raise Refusal(f'{place}: turn {turn} has no text "{name}"; {shape}')
    return str(item.get("id", place)), item["conversations"]


def render(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [n], loss_mask bool [n]) of one conversation under the model's chat template.

    The supervised span of an assistant turn runs from the end of the generation prompt to the turn's end
    token: what the model itself would emit, never the header nor the line break after it. Spans are found by
    rendering every prefix of the conversation; each must be a prefix of the next, else ValueError (the
    template rewrites history). Each span is tokenised by itself, as at serving time, where prompt and answer
    never merge into one token. A turn with `"finish": "length"` was cut by a token limit: its end token is
    the template's, not supervised.
    """

    def text(upto: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=prompt)

    whole = text(len(messages), False)
    pieces: list[tuple[str, bool, bool]] = []  # text, supervised, cut
    done = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head, body = text(turn, True), text(turn + 1, False)
        if not (whole.startswith(body) and body.startswith(head)):
            raise ValueError("the chat template rewrites earlier turns")
        cut = message.get("finish") == "length"
        pieces += [(whole[done : len(head)], False, False), (whole[len(head) : len(body)], True, cut)]
        done = len(body)
    if done == 0:
        raise ValueError("no assistant turn")
    special = set(tokenizer.all_special_ids)
    ids: list[int] = []
    mask: list[bool] = []
    for (
        piece,
        supervised,
        cut,
    ) in pieces:  # what follows the last assistant turn teaches nothing and is left out
        tokens = tokenizer(piece, add_special_tokens=False)["input_ids"]
        last = max((i for i, token in enumerate(tokens) if token in special), default=len(tokens) - 1)
        ids += tokens
        mask += [supervised and i <= last - cut for i in range(len(tokens))]
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != whole[:done]:
        raise ValueError("its tokens do not spell the rendered text")
    return torch.tensor(ids), torch.tensor(mask)


class RowOrder:
    """Global row index -> packed row. Epoch e is a fresh shuffle of all documents; nothing depends on earlier
    calls."""

    def __init__(self, documents: list[Document], *, budget: int, seed: int) -> None:
        too_long = next((d for d in documents if len(d.ids) > budget), None)
        if too_long is not None:
            raise Refusal(
                f"document {too_long.key} has {len(too_long.ids)} tokens, data.budget is {budget}: cut it"
            )
        self._documents, self._budget, self._seed = documents, budget, seed
        self._starts: list[int] = [0]  # first row of each epoch; lengths alone decide it
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def row(self, index: int) -> Row:
        epoch = 0
        while True:
            if epoch + 1 == len(self._starts):
                self._starts.append(self._starts[epoch] + len(self._plan(epoch)))
            if index < self._starts[epoch + 1]:
                return self._pack(index, self._plan(epoch)[index - self._starts[epoch]])
            epoch += 1

    def _plan(self, epoch: int) -> list[list[int]]:
        """The document numbers of each row of `epoch`: first-fit over the shuffled documents."""
        if self._epoch[0] != epoch:
            order = torch.randperm(
                len(self._documents), generator=generator(self._seed, "rows", epoch)
            ).tolist()
            rows: list[list[int]] = []
            room: list[int] = []
            for document in order:
                need = len(self._documents[document].ids)
                first = max(0, len(rows) - _OPEN_ROWS)
                fit = next((r for r in range(first, len(rows)) if room[r] >= need), None)
                if fit is None:
                    rows.append([document])
                    room.append(self._budget - need)
                else:
                    rows[fit].append(document)
                    room[fit] -= need
            self._epoch = (epoch, rows)
        return self._epoch[1]

    def _pack(self, index: int, numbers: list[int]) -> Row:
        return pack([self._documents[number] for number in numbers], self._budget, index)


def pack(documents: list[Document], budget: int, index: int = 0) -> Row:
    """Lay documents side by side and pad to `budget`; padding has id 0, document -1 and its own positions."""
    lengths = [len(d.ids) for d in documents]
    pad = budget - sum(lengths)
    numbers = torch.tensor([*range(len(lengths)), -1], dtype=torch.int32)
    return Row(
        index=index,
        ids=torch.cat([*(d.ids for d in documents), torch.zeros(pad, dtype=torch.int64)]),
        loss_mask=torch.cat([*(d.loss_mask for d in documents), torch.zeros(pad, dtype=torch.bool)]),
        doc_ids=numbers.repeat_interleave(torch.tensor([*lengths, pad])),
        positions=torch.cat([torch.arange(n) for n in (*lengths, pad)]),
        tokens=sum(lengths),
    )
