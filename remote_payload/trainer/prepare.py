"""A large corpus is rendered and tokenised once, on all cores, and looked at before GPUs are paid for it.

    python -m trainer.prepare IN.jsonl --model DIR --out OUT.safetensors [--max-document N] [--workers N]

Conversations become documents as in training (rendering.py), in the order of the file, the same bytes
whatever the number of workers. A recipe's `data.train` and `data.heldout` name the result; it is refused with
another tokenizer or chat template. What was dropped, cut or split is printed with its reason.

Exit codes: 0 written, 2 refused (one line), 130 interrupted (nothing is written).
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trainer import prepared
from trainer.data import load_tokenizer, nothing_supervised, read_lines, render_line
from trainer.errors import Refusal
from trainer.rendering import Renderer

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism

_CHUNK = 256  # conversations a worker takes at once: some tenths of a second
_AHEAD = 4  # chunks a worker, so that none waits for this process and the file is not read into memory
_PERCENTILES = (5, 25, 50, 75, 95, 99)


@dataclass
class Part:
    """What a chunk of lines gave; `heads` counts conversations, `lengths` documents."""

    ids: np.ndarray
    mask: np.ndarray
    lengths: list[int]
    keys: list[str]
    heads: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    size: int = 0


_renderer: Renderer | None = None


def _start_worker(model: str) -> None:
    global _renderer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the work
    torch.set_num_threads(1)
    _renderer = Renderer(load_tokenizer(model))


def _work(lines: list[tuple[int, str]], path: str, max_document: int) -> Part:
    assert _renderer is not None
    return render_part(_renderer, lines, path, max_document)


def render_part(renderer: Renderer, lines: list[tuple[int, str]], path: str, max_document: int) -> Part:
    """Numbered lines of `path` as documents end to end. Raises Refusal with file:line."""
    part = Part(np.empty(0, np.int32), np.empty(0, np.uint8), [], [])
    ids, mask = [part.ids], [part.mask]
    for number, line in lines:
        part.size += len(line.encode())
        documents = render_line(renderer, line, f"{path}:{number}", part.dropped)
        kept = 0
        for document in documents:
            shorter = document.cut(max_document)
            if not bool(shorter.loss_mask.any()):
                part.dropped[nothing_supervised(max_document)] += 1
                continue
            kept += 1
            part.cut += len(shorter.ids) < len(document.ids)
            ids.append(shorter.ids.numpy().astype(np.int32))
            mask.append(shorter.loss_mask.numpy().astype(np.uint8))
            part.lengths.append(len(shorter.ids))
            part.keys.append(shorter.key)
        part.heads += kept > 0
    part.ids, part.mask = np.concatenate(ids), np.concatenate(mask)
    return part


def chunks(path: Path) -> Iterator[list[tuple[int, str]]]:
    chunk: list[tuple[int, str]] = []
    for numbered in read_lines(path):
        chunk.append(numbered)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def parts(path: Path, model: str, max_document: int, workers: int) -> Iterator[Part]:
    """The file's parts in its order, from `workers` processes; with one, from this process."""
    if workers == 1:
        renderer = Renderer(load_tokenizer(model))
        for chunk in chunks(path):
            yield render_part(renderer, chunk, str(path), max_document)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of torch
    with ProcessPoolExecutor(workers, context, _start_worker, (model,)) as pool:
        waiting: deque[Future[Part]] = deque()
        try:
            for chunk in chunks(path):
                waiting.append(pool.submit(_work, chunk, str(path), max_document))
                if len(waiting) >= workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise Refusal("a worker was killed, perhaps for memory: fewer --workers") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def prepare(path: Path, model: str, out: Path, max_document: int, workers: int) -> prepared.Prepared:
    """Render `path` and write `out`; progress goes to stderr. Raises Refusal."""
    tokenizer = load_tokenizer(model)  # a missing model is told before a worker starts
    began = told = time.monotonic()
    try:
        size = path.stat().st_size
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror})") from None
    _tell(f"{path}, {size / 1e6:,.1f} MB, {workers} worker(s)")
    every = 1.0 if sys.stderr.isatty() else 10.0
    done: list[Part] = []
    tokens = read = 0
    for part in parts(path, model, max_document, workers):
        done.append(part)
        tokens, read = tokens + len(part.ids), read + part.size
        now = time.monotonic()
        if now - told >= every:
            told = now
            left = (now - began) * (size - read) / read
            rate = tokens / (now - began)
            _tell(f"{read / size:.0%}, {tokens:,} tokens, {rate:,.0f} tok/s, {left:.0f} s left")
    lengths = [length for part in done for length in part.lengths]
    dropped = sum((part.dropped for part in done), Counter())
    if not lengths:
        reasons = "; ".join(f"{count}: {why}" for why, count in dropped.items()) or "the file is empty"
        raise Refusal(f"{path}: no usable conversation ({reasons})")
    tokenizer_print, template_print = prepared.fingerprints(tokenizer)
    result = prepared.Prepared(
        ids=torch.from_numpy(np.concatenate([part.ids for part in done])),
        mask=torch.from_numpy(np.concatenate([part.mask for part in done])).bool(),
        starts=torch.tensor([0, *lengths]).cumsum(0),
        keys=[key for part in done for key in part.keys],
        origin=prepared.Origin(
            source=path.name,
            sha256=_sha256(path),
            max_document=max_document,
            tokenizer=tokenizer_print,
            template=template_print,
            conversations=sum(part.heads for part in done),
            cut=sum(part.cut for part in done),
            dropped=dict(sorted(dropped.items())),
        ),
    )
    prepared.write(out, result)
    spent = time.monotonic() - began
    _tell(f"{tokens:,} tokens in {spent:.1f} s, {tokens / spent:,.0f} tok/s with {workers} worker(s)")
    return result


def _tell(text: str) -> None:
    print(f"prepare: {text}", file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def summary(made: prepared.Prepared) -> str:
    """What the corpus is like, for a person: counts, losses with reasons, lengths."""
    origin, lengths = made.origin, made.starts.diff().numpy()
    share = made.mask.float().mean().item()
    lines = [
        f"{len(lengths):,} documents from {origin.conversations:,} conversations, "
        f"{len(made.ids):,} tokens, {share:.1%} supervised"
    ]
    if more := len(lengths) - origin.conversations:
        lines.append(f"  {more:,} documents more than conversations: the template rewrites earlier turns")
    lines += [f"  dropped {count:,}: {reason}" for reason, count in origin.dropped.items()]
    if origin.cut:
        lines.append(f"  cut {origin.cut:,} documents at {origin.max_document:,} tokens")
    marks = [f"p{p} {np.percentile(lengths, p):,.0f}" for p in _PERCENTILES]
    lines.append(f"  length  min {lengths.min():,}  {'  '.join(marks)}  max {lengths.max():,}")
    return "\n".join([*lines, *_histogram(lengths)])


def _histogram(lengths: np.ndarray) -> list[str]:
    """Powers of two: packing cares for orders of magnitude."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = {power: int((powers == power).sum()) for power in range(powers.min(), powers.max() + 1)}
    widest = max(counts.values())
    return [
        f"  {'<=':>6} {2**power:>9,}  {count:>10,}  {'#' * round(40 * count / widest)}".rstrip()
        for power, count in counts.items()
    ]


def _refuse_place(out: Path, source: Path) -> None:
    """Raises Refusal where `out` cannot be written: known before hours of work and not after them."""
    folder = out.absolute().parent
    if not folder.is_dir():
        raise Refusal(f"--out {out}: no such folder; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal(f"--out {out}: nothing can be written in {folder}; name another")
    if out.is_dir() or (out.exists() and source.exists() and out.samefile(source)):
        raise Refusal(f"--out {out}: is a folder, or the conversations themselves; name another")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.prepare", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("conversations", type=Path, help="jsonl, a conversation a line")
    parser.add_argument("--model", required=True, help="folder of the target: its tokenizer and template")
    parser.add_argument("--out", type=Path, required=True, help="file to write, OUT.safetensors")
    parser.add_argument(
        "--max-document", type=int, default=4096, help="cut at this many tokens (default 4096)"
    )
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    args = parser.parse_args(argv)
    try:
        if args.out.suffix != prepared.SUFFIX:
            raise Refusal(
                f"--out {args.out}: name it …{prepared.SUFFIX}, by which recipes tell it from jsonl"
            )
        if min(args.workers, args.max_document) < 1:
            raise Refusal("--workers and --max-document must be at least 1")
        _refuse_place(args.out, args.conversations)
        made = prepare(args.conversations, args.model, args.out, args.max_document, args.workers)
    except Refusal as refusal:
        print(f"prepare: refused: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{args.out}: {summary(made)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
