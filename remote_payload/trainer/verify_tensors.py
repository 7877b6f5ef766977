"""Servers ignore tensors they do not know and miss in silence those they need, so the table is checked here.

The layout: `fc`, `hidden_norm`, `norm` and eleven tensors a layer, 58 for five layers; no embedding, no head.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from trainer.finding import Finding, fail, ok, or_ok, warn
from trainer.verify_config import MOST_LAYERS, SIZES, is_count, layer_ids_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = 5  # names in one line


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies and what its header says."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def is_file(path: Path) -> bool:
    """A regular file: opening a pipe would wait for ever, and a name may be too long to ask for."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_text(path: Path) -> str:
    """Raises OSError, ValueError for what is no UTF-8."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file")
    return path.read_text(encoding="utf-8")


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of the layout, or None if config.json lacks a size."""
    ids = layer_ids_of(config)
    if ids is None or not all(is_count(config.get(key)) for key in SIZES):
        return None
    if config["num_hidden_layers"] > MOST_LAYERS:
        return None
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    table: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        table |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return table


def check_tensors(folder: Path, config: dict[str, Any]) -> list[Finding]:
    """All findings of the folder's safetensors: files, names, shapes, dtypes, values."""
    stored, findings = _read_headers(folder)
    if not stored:
        return findings
    plain, prefix = _without_prefix(stored)
    findings += prefix
    table = expected_tensors(config)
    if table is None:
        findings.append(
            fail("tensors cannot be checked against config.json", "it lacks sizes: mend those lines first")
        )
    else:
        findings += or_ok(_names(plain, table), f"exactly the {len(table)} tensors of the layout")
        findings += or_ok(_shapes(plain, table), "shapes are those that config.json asks for")
    findings += or_ok(_dtypes(plain), "every tensor is bf16")
    findings += or_ok(_values(plain), "no NaN, no infinity, no tensor of zeros")
    return findings


def _read_headers(folder: Path) -> tuple[dict[str, Stored], list[Finding]]:
    """Tensors by stored name; a folder whose files cannot be read gives none and says why."""
    present = sorted(path.name for path in folder.glob("*.safetensors") if is_file(path))
    if not present:
        other = ", ".join(sorted(p.name for p in folder.glob("*.bin")))
        return {}, [
            fail(
                "no safetensors file" + (f", only {other}" if other else ""),
                "servers read safetensors: export or convert the weights",
            )
        ]
    where: dict[str, str] | None = None
    files = present
    findings: list[Finding] = []
    if (folder / INDEX).exists():
        try:
            where = json.loads(read_text(folder / INDEX))["weight_map"]
            files = sorted(set(where.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return {}, [fail(f"{INDEX} cannot be read ({error!r})", "write it again")]
    elif SINGLE in present:
        files = [SINGLE]
    else:
        findings.append(
            fail(f"neither {SINGLE} nor {INDEX}", f"loaders look for these names, not {_list(present)}")
        )
    if extra := sorted(set(present) - set(files)):
        findings.append(
            warn(f"{_list(extra)} belongs to no index", "some loaders read every safetensors file: remove it")
        )
    stored: dict[str, Stored] = {}
    for name in files:
        if name not in present:
            findings.append(fail(f"{name} is missing", f"{INDEX} names it: copy the shard here"))
            continue
        found, problem = _read_header(folder / name)
        if problem:
            findings.append(problem)
        if twice := [tensor.name for tensor in found if tensor.name in stored]:
            findings.append(fail(f"{_list(twice)} is in {name} and in a shard before it", "keep one"))
        stored |= {tensor.name: tensor for tensor in found}
    if where is not None:
        lost = sorted(n for n, f in where.items() if n not in stored or stored[n].file.name != f)
        if lost and not any(f.verdict == "FAIL" for f in findings):
            findings.append(
                fail(f"{_list(lost)} is not in the shard that {INDEX} names", "write the index again")
            )
    if stored and not findings:
        size = sum(path.stat().st_size for path in {tensor.file for tensor in stored.values()})
        findings.append(ok(f"{len(files)} safetensors file(s), {len(stored)} tensors, {size / 1e6:,.1f} MB"))
    return stored, findings


def _read_header(path: Path) -> tuple[list[Stored], Finding | None]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            found = [Stored(path, n, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()]
            if not (file.metadata() or {}).get("format"):
                return found, fail(
                    f"{path.name} has no metadata format",
                    'transformers refuses it: save with metadata={"format": "pt"}',
                )
            return found, None
    except (OSError, SafetensorError) as error:
        text = str(error).splitlines()[0]
        return [], fail(f"{path.name} cannot be read ({text})", "it is cut or damaged: copy it again")


def _without_prefix(stored: dict[str, Stored]) -> tuple[dict[str, Stored], list[Finding]]:
    prefixed = [name for name in stored if name.startswith("model.")]
    if not prefixed:
        return stored, []
    plain = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    if len(prefixed) == len(stored) and len(plain) == len(stored):
        return plain, [ok('names carry the prefix "model.", which vLLM and SGLang accept')]
    return plain, [
        fail(f'{len(prefixed)} of {len(stored)} names carry the prefix "model."', "write all or none with it")
    ]


def _names(stored: dict[str, Stored], table: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    if missing := [name for name in table if name not in stored]:
        yield fail(
            f"{len(missing)} tensor(s) missing: {_list(missing)}",
            "SGLang would draft with random values and say nothing; export again",
        )
    rest = [name for name in stored if name not in table]
    for part, text, mend in (
        (
            "mask_hidden",
            "a learned mask state",
            "vLLM stops at it: this layout uses the target's embedding row",
        ),
        ("embed_tokens", "an embedding", "vLLM takes it for the target's, SGLang ignores it: remove it"),
        ("lm_head", "a head", "vLLM takes it for the target's, SGLang ignores it: remove it"),
        ("d2t", "a reduced vocabulary", "this layout has the target's whole vocabulary"),
        ("t2d", "a reduced vocabulary", "this layout has the target's whole vocabulary"),
    ):
        if hits := [name for name in rest if part in name]:
            yield fail(f"{_list(hits)} is {text}", mend)
            rest = [name for name in rest if name not in hits]
    if buffers := [name for name in rest if name.endswith("inv_freq")]:
        yield warn(f"{_list(buffers)} is a buffer", "harmless; servers compute it: remove it")
        rest = [name for name in rest if name not in buffers]
    if rest:
        yield fail(
            f"{len(rest)} tensor(s) of no layer: {_list(rest)}",
            "servers ignore them, so they draft with something else than was trained",
        )


def _shapes(stored: dict[str, Stored], table: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    for name, shape in table.items():
        if name in stored and stored[name].shape != shape:
            more = " (target layers × hidden_size wide)" if name == "fc.weight" else ""
            yield fail(
                f"{name} is {list(stored[name].shape)}",
                f"config.json asks for {list(shape)}{more}: correct the one that is wrong",
            )


def _dtypes(stored: dict[str, Stored]) -> Iterator[Finding]:
    kinds: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        kinds.setdefault(tensor.dtype, []).append(name)
    for dtype, names in sorted(kinds.items()):
        if dtype in ("F16", "F32"):
            yield warn(
                f"{len(names)} tensor(s) in {dtype}: {_list(names)}", "servers draft in bf16: export so"
            )
        elif dtype != "BF16":
            yield fail(
                f"{len(names)} tensor(s) in {dtype}: {_list(names)}", "no loader takes it: export in bf16"
            )


def _values(stored: dict[str, Stored]) -> Iterator[Finding]:
    from safetensors import safe_open

    for path in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(path, "pt") as file:
            for name, tensor in stored.items():
                if tensor.file != path or tensor.dtype not in ("BF16", "F16", "F32", "F64"):
                    continue
                low, high = (float(bound) for bound in file.get_tensor(tensor.name).aminmax())
                if not (isfinite(low) and isfinite(high)):  # NaN passes through minimum and maximum
                    yield fail(
                        f"{name} holds NaN or infinity", "the run diverged: export an earlier checkpoint"
                    )
                elif low == high == 0:
                    yield fail(f"{name} is all zeros", "it was never loaded or trained: export again")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
