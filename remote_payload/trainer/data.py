"""Conversations become packed rows in an order that the seed alone decides, so resume needs no cursor."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer import prepared
from trainer.errors import Refusal, last_line
from trainer.rendering import Dropped, Renderer, parse_line
from trainer.seeding import generator

# First-fit looks at this many rows: the fill stays above 95 % and packing is linear in the number of
# documents.
_OPEN_ROWS = 64


@dataclass(frozen=True)
class Document:
    """A conversation, or the part of one that the model saw at once (see rendering.py). ids int64 [n];
    loss_mask bool [n], true on what the assistant wrote; key: its `id`, with `#2` … for a later part."""

    ids: torch.Tensor
    loss_mask: torch.Tensor
    key: str

    def cut(self, length: int) -> Document:
        """Its first `length` tokens."""
        return (
            self
            if len(self.ids) <= length
            else replace(self, ids=self.ids[:length], loss_mask=self.loss_mask[:length])
        )


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
    """What a file gave: the documents, how many of each one's tokens are supervised, the highest token, and
    how many conversations were dropped for which reason."""

    documents: list[Document]
    supervised: list[int]
    highest: int
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line for the log."""
        tokens = sum(len(d.ids) for d in self.documents)
        share = sum(self.supervised) / max(tokens, 1)
        line = f"{len(self.documents):,} documents, {tokens:,} tokens, {share:.0%} supervised"
        return line + "".join(
            f"; dropped {count}: {reason}" for reason, count in sorted(self.dropped.items())
        )


def load_tokenizer(model: str) -> Any:
    """The target's own tokenizer, from its folder alone."""
    if not Path(model).is_dir():  # transformers would take it for the name of a repository
        raise Refusal(f"target model {model}: no such folder; name the one that holds the tokenizer")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file leads them into
        if not any((Path(model) / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise Refusal(f"target model {model}: no tokenizer.json there: fetch the tokenizer") from None
        raise Refusal(
            f"target model {model}: its tokenizer cannot be loaded ({last_line(error)}): fetch config.json "
            "and the tokenizer's files again"
        ) from None
    if not tokenizer.chat_template:
        raise Refusal(
            f"target model {model}: its tokenizer has no chat template; add chat_template.jinja there"
        )
    return tokenizer


def load_corpus(path: Path, tokenizer: Any, *, max_document: int, min_supervised: int = 1) -> Corpus:
    """Documents from jsonl conversations (see rendering.py), or from a file that trainer.prepare made.

    Documents are cut at `max_document` tokens; one with fewer than `min_supervised` supervised tokens is
    dropped. Raises Refusal with file:line for a malformed line, and for a file that gives no document."""
    if path.suffix == prepared.SUFFIX:
        corpus = _from_prepared(path, tokenizer, max_document)
    else:
        corpus = Corpus([], [], 0)
        renderer = Renderer(tokenizer)
        for number, line in read_lines(path):
            for document in render_line(renderer, line, f"{path}:{number}", corpus.dropped):
                document = document.cut(max_document)
                corpus.documents.append(document)
                corpus.supervised.append(int(document.loss_mask.sum()))
                corpus.highest = max(corpus.highest, int(document.ids.max()))
    dropped = corpus.dropped
    useful = []
    for document, supervised in zip(corpus.documents, corpus.supervised, strict=True):
        if supervised >= min_supervised:
            useful.append(document)
        elif supervised:
            dropped[f"fewer than {min_supervised} supervised tokens"] += 1
        else:
            dropped[nothing_supervised(max_document)] += 1
    if not useful:
        reasons = "; ".join(f"{count}: {why}" for why, count in dropped.items()) or "the file is empty"
        raise Refusal(f"{path}: no usable conversation ({reasons})")
    counts = [count for count in corpus.supervised if count >= min_supervised]
    return Corpus(useful, counts, corpus.highest, dropped)


def nothing_supervised(max_document: int) -> str:
    """The reason for dropping a document whose answers all begin later than it may be long."""
    return f"nothing supervised within {max_document} tokens"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank; a file that cannot be read, or is not UTF-8, is refused."""
    number = 0
    try:
        with path.open(encoding="utf-8", newline="\n") as file:  # U+2028 and \r may stand in a text
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: not UTF-8 after line {number} ({error.reason}): convert it") from None


def render_line(renderer: Renderer, line: str, place: str, dropped: Counter[str]) -> list[Document]:
    """The documents of one conversation; none and a reason counted in `dropped` if it is of no use."""
    try:
        conversation = parse_line(line, place)
        rendered = renderer.documents(conversation)
    except Dropped as reason:
        dropped[str(reason)] += 1
        return []
    return [
        Document(
            torch.tensor(one.ids),
            torch.tensor(one.mask),
            conversation.key if number == 0 else f"{conversation.key}#{number + 1}",
        )
        for number, one in enumerate(rendered)
    ]


def _from_prepared(path: Path, tokenizer: Any, max_document: int) -> Corpus:
    """Whole tensors at a time: document by document, 800,000 of them take half a minute."""
    file = prepared.read(path, tokenizer, max_document)
    lengths = file.starts.diff()
    sizes = lengths.tolist()
    parts = zip(file.ids.long().split(sizes), file.mask.split(sizes), file.keys, strict=True)
    ends = file.starts[:-1] + lengths.clamp(max=max_document)
    edges = torch.stack([file.starts[:-1], ends], 1).flatten().numpy()
    edges = edges[:-1] if edges[-1] == len(file.mask) else edges  # the last sum goes on to the end
    supervised = np.add.reduceat(file.mask.numpy().view(np.uint8), edges, dtype=np.int32)[::2]
    return Corpus(
        [Document(ids, mask, key).cut(max_document) for ids, mask, key in parts],
        supervised.tolist(),
        int(file.ids.max()),
        Counter(file.origin.dropped),
    )


class RowOrder:
    """Global row index -> packed row. Epoch e is a fresh shuffle of all documents; nothing depends on earlier
    calls, but where an epoch begins follows from all before it.

    `starts`: the first row of each epoch from 0 on, as far as `starts` of an equal order has told them: a
    resumed run then need not lay out the epochs that are done."""

    def __init__(
        self, documents: list[Document], *, budget: int, seed: int, starts: Sequence[int] = (0,)
    ) -> None:
        self._lengths = [len(d.ids) for d in documents]
        longest = max(self._lengths)
        if longest > budget:
            key = documents[self._lengths.index(longest)].key
            raise Refusal(f"document {key} has {longest} tokens, data.budget is {budget}: cut it")
        self._documents, self._budget, self._seed = documents, budget, seed
        self.starts = list(starts)
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def row(self, index: int) -> Row:
        while index >= self.starts[-1]:
            epoch = len(self.starts) - 1
            self.starts.append(self.starts[epoch] + len(self._plan(epoch)))
        epoch = bisect.bisect_right(self.starts, index) - 1
        return self._pack(index, self._plan(epoch)[index - self.starts[epoch]])

    def _plan(self, epoch: int) -> list[list[int]]:
        """The document numbers of each row of `epoch`: first-fit over the shuffled documents."""
        if self._epoch[0] != epoch:
            order = torch.randperm(len(self._documents), generator=generator(self._seed, "rows", epoch))
            rows: list[list[int]] = []
            room: list[int] = []
            for document in order.tolist():
                need = self._lengths[document]
                for fit in range(max(0, len(rows) - _OPEN_ROWS), len(rows)):
                    if room[fit] >= need:
                        rows[fit].append(document)
                        room[fit] -= need
                        break
                else:
                    rows.append([document])
                    room.append(self._budget - need)
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
