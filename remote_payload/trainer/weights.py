"""Tensors of a Hugging Face folder, read where they are needed: whole shards in memory would double the peak.

A folder's shards are indexed from their headers, so what is missing, cut short or misshapen is known before
a byte of the weights is read.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import Refusal

# Copies from the page cache to a GPU wait for page faults and the bus, not for each other.
READERS = 4
PROGRESS_S = 1.0
SHARED_MEMORY = Path("/dev/shm")
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file of a staged copy, evenly from its beginning to its end


@dataclass(frozen=True)
class Stored:
    """One tensor as its shard's header describes it; `dtype` in the format's words (F32, BF16, …), `bytes` as
    stored."""

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def staged(model: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """The copy of a model folder in shared memory when it is whole and the same there, else the folder."""
    copy = shared_memory / model.name
    needed = [path for path in model.iterdir() if path.suffix in (".json", ".safetensors")]
    try:
        return copy if all(_alike(path, copy / path.name) for path in needed) else model
    except OSError:
        return model


def _alike(one: Path, other: Path) -> bool:
    """Equal in size and in samples: another tuning of the same model has the same sizes and names."""
    size = one.stat().st_size
    if other.stat().st_size != size:
        return False
    with one.open("rb") as a, other.open("rb") as b:
        for sample in range(SAMPLES):
            for file in (a, b):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            if a.read(SAMPLE_BYTES) != b.read(SAMPLE_BYTES):
                return False
    return True


def index(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors files. Raises Refusal: none there, a shard missing or cut
    short, an index that names what no shard holds."""
    listing = folder / "model.safetensors.index.json"
    if listing.is_file():
        try:
            places: dict[str, str] = json.loads(_text(listing))["weight_map"]
            shards = [folder / name for name in sorted(set(places.values()))]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Refusal(f"{listing} is not an index of safetensors: fetch the model again") from None
    else:
        places = {}
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {others[0]}" if others else "no weights"
        raise Refusal(f"{folder} has {found}: the target is read from safetensors files; convert it to those")
    stored = {each.name: each for shard in shards for each in _header(shard)}
    if absent := sorted(set(places) - set(stored)):
        raise Refusal(f"{listing} names {absent[0]}, which {places[absent[0]]} has not: fetch both again")
    return stored


def _header(shard: Path) -> list[Stored]:
    """The format's header: its length in 8 bytes, then JSON with shape and offsets of each tensor."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head: dict[str, Any] = json.loads(file.read(min(length, size)))
        head.pop("__metadata__", None)
        found = [
            Stored(name, shard, str(entry["dtype"]), tuple(entry["shape"]), last - first)
            for name, entry in head.items()
            for first, last in (entry["data_offsets"],)
        ]
        ends = max((entry["data_offsets"][1] for entry in head.values()), default=0)
    except FileNotFoundError:
        raise Refusal(f"{shard} is missing: fetch the model again") from None
    except PermissionError:
        raise Refusal(f"{shard} may not be read by us: chmod -R a+rX its folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(
            f"{shard} cannot be read as safetensors ({type(error).__name__}): fetch it again"
        ) from None
    if size < 8 + length + ends:
        raise Refusal(f"{shard} has {size:,} of {8 + length + ends:,} bytes: fetch it again")
    return found


def read(
    wanted: Sequence[Stored],
    device: torch.device,
    place: Callable[[Stored, Tensor], None],
    on_progress: Callable[[str], None],
) -> None:
    """Give each tensor, on `device`, to `place`; any order, several at a time. `on_progress` hears from this
    thread how far it is, and may end the reading by raising."""
    from safetensors import SafetensorError, safe_open

    opened = threading.local()

    def fetch(each: Stored) -> int:
        files = vars(opened).setdefault("files", {})
        if each.shard not in files:
            files[each.shard] = safe_open(each.shard, framework="pt", device=str(device))
        place(each, files[each.shard].get_tensor(each.name))
        return each.bytes

    total, done = sum(each.bytes for each in wanted), 0
    began = told = time.monotonic()
    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        pending = [pool.submit(fetch, each) for each in wanted]
        try:
            for future in as_completed(pending):
                done += future.result()
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    on_progress(progress(done, total, told - began))
        except SafetensorError as error:
            pool.shutdown(cancel_futures=True)
            folder, reason = wanted[0].shard.parent, str(error).splitlines()[0]
            raise Refusal(f"{folder}: damaged safetensors ({reason}): fetch them again") from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    on_progress(progress(total, total, time.monotonic() - began))


def finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite: one that is spoils the sum, which is read in one pass."""
    return bool(tensor.sum(dtype=torch.float32).isfinite())


def progress(done: int, total: int, seconds: float) -> str:
    """`weights: 12.3 of 50.1 GiB, 4.5 GiB/s`"""
    gib = 2**30
    return f"weights: {done / gib:.1f} of {total / gib:.1f} GiB, {done / gib / max(seconds, 1e-3):.1f} GiB/s"


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated there; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = _text(Path("/proc/meminfo")).splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
