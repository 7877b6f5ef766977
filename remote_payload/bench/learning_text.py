"""Text for a target that learns a language in two minutes: the Python sources that are on every machine.

Functions and classes become conversations "complete this" with a prompt of a fixed number of tokens, so that
answers can be generated in large batches without padding. A file is held out as a whole, by its name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

PACKAGES = ("torch", "transformers")  # beside the standard library: the trainer has them in any case
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
HELD_OUT = 24  # every n-th file
PAD, START, END, MASK = range(4)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AFTER_PROMPT = "<|im_end|>\n<|im_start|>assistant\n"
_UNIT = re.compile(r"^([ \t]*)(?:async def|def|class) ", re.MULTILINE)
_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer packs into one on average


@dataclass(frozen=True)
class Unit:
    """One function or class, its indentation taken away; `whole` is False if it was cut."""

    file: str
    text: str
    whole: bool

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha256(self.file.encode()).hexdigest(), 16) % HELD_OUT == 0


@dataclass(frozen=True)
class Samples:
    """ids uint16 [n, T], zeros after each sample; lengths int32 [n]; prompts end after `prompt` tokens."""

    ids: numpy.ndarray
    lengths: numpy.ndarray
    prompt: int


def source_files(packages: Iterable[str] = PACKAGES) -> Iterator[tuple[str, str]]:
    """(name, text) of every ASCII source file of the standard library and `packages`, in a fixed order."""
    roots = {"": Path(sysconfig.get_paths()["stdlib"])}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots[f"{package}/"] = Path(spec.submodule_search_locations[0])
    for prefix, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if not SKIPPED.intersection(inside.parts):
                data = path.read_bytes()
                if data.isascii():
                    yield f"{prefix}{inside.as_posix()}", data.decode("ascii").replace("\r\n", "\n")


def units(file: str, text: str, characters: int) -> Iterator[Unit]:
    """Every function and class of one file, each cut to `characters`."""
    for start in _UNIT.finditer(text):
        indent = start[1]
        piece = text[start.start() : start.start() + 2 * characters]
        whole = len(piece) < 2 * characters
        lines = []
        for number, line in enumerate(piece.split("\n")):
            inner = line.startswith(indent) and line[len(indent) : len(indent) + 1] in (" ", "\t", ")")
            if number and line.strip() and not inner:
                whole = True
                break
            lines.append(line[len(indent) :])
        body = "\n".join(lines).rstrip()
        yield Unit(file, body[:characters], whole and len(body) <= characters)


def collect(samples: int, tokens: int, packages: Iterable[str] = PACKAGES) -> list[Unit]:
    """At most `samples` distinct units, spread evenly over all files; long enough ones only."""
    found: dict[str, Unit] = {}
    for file, text in source_files(packages):
        for unit in units(file, text, tokens * _CHARACTERS_PER_TOKEN):
            if len(unit.text) > tokens:
                found.setdefault(unit.text, unit)
    every = list(found.values())
    step = max(1.0, len(every) / samples)
    return [every[int(i * step)] for i in range(min(samples, len(every)))]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE with a chat template; ids 0 to 3 are padding, turn start, turn end and mask."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[END], pad_token=SPECIAL[PAD])
    fast.add_special_tokens({"additional_special_tokens": [SPECIAL[START], SPECIAL[MASK]]})
    fast.chat_template = TEMPLATE
    return fast


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """On all cores, and without the bookkeeping of the wrapper."""
    found = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [one.ids for one in found]


def decode(tokenizer: Any, ids: list[list[int]]) -> list[str]:
    return tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)


def conversations(tokenizer: Any, chosen: list[Unit], prompt: int, tokens: int) -> Samples:
    """Units as prompt (exactly `prompt` tokens) and answer, cut to `tokens`; what does not survive its own
    tokenizer at the cut, or leaves less answer than half a prompt, is left out."""
    after = encode(tokenizer, [AFTER_PROMPT])[0]
    room = prompt - 1 - len(after)  # without the turn start and what follows the user's text
    texts = [f"user\nComplete {unit.file}\n{unit.text}" for unit in chosen]
    heads = [
        ids[:room] for ids in encode(tokenizer, [text[: _CHARACTERS_PER_TOKEN * room] for text in texts])
    ]
    spelled = decode(tokenizer, heads)
    again = encode(tokenizer, spelled)
    answers = encode(tokenizer, [text[len(head) :] for text, head in zip(texts, spelled, strict=True)])
    rows = []
    for unit, head, same, answer in zip(chosen, heads, again, answers, strict=True):
        if len(head) < room or head != same or len(answer) < prompt // 2:
            continue
        rows.append(([START, *head, *after, *answer] + [END] * unit.whole)[:tokens])
    ids = numpy.full((len(rows), tokens), PAD, dtype=numpy.uint16)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return Samples(ids, numpy.array([len(row) for row in rows], dtype=numpy.int32), prompt)
