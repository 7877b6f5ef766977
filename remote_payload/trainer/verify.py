"""Most failed drafters trained well and were served wrongly: this reads a checkpoint as the servers will.

    python -m trainer.verify DIR [--target MODEL] [--json]

For any folder in the z-lab layout, made here or elsewhere. One line a finding: `ok`, `warn` (it serves, but
look) or `FAIL` (a server refuses it, or drafts wrongly without a word), what, and the mend.

Exit codes: 0 no FAIL, 1 at least one FAIL, 2 usage (no such folder).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.errors import Refusal
from trainer.finding import FAIL, OK, WARN, Finding, fail, warn
from trainer.geometry import target_text_config
from trainer.verify_config import check_config, check_target, dflash_of, is_count
from trainer.verify_tensors import check_tensors, is_file, read_text


def verify(folder: Path, target: str | None = None) -> list[Finding]:
    """Every finding about the checkpoint in `folder`, against the model folder `target` if given.

    Reads all weights once. Raises Refusal if `folder` is none, or `target` has no readable config.json."""
    if not folder.is_dir():
        raise Refusal(f"{folder}: no such folder; name the one that holds config.json and the weights")
    wanted = target_text_config(target) if target else None
    try:
        config = json.loads(read_text(folder / "config.json"))
        if not isinstance(config, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        return [fail(f"config.json cannot be read ({reason})", "write it; no loader works without it")]
    findings = check_config(config)
    findings += check_auto_map(folder, config)
    findings += check_tensors(folder, config)
    if wanted is not None:
        findings += check_target(config, wanted)
        findings += check_mask_word(str(target), config)
    return findings


def check_auto_map(folder: Path, config: dict[str, Any]) -> list[Finding]:
    """`auto_map` serves AutoModel only, and only with the file that it names."""
    value = config.get("auto_map")
    model = value.get("AutoModel") if isinstance(value, dict) else None
    if not isinstance(model, str) or "--" in model or is_file(folder / f"{model.split('.')[0]}.py"):
        return []
    return [warn(f"auto_map names {model}, whose file is not here", "add it, or drop auto_map")]


def check_mask_word(target: str, config: dict[str, Any]) -> list[Finding]:
    """An ordinary word as mask token would be met in texts; the tokenizer tells, where there is one."""
    path, mask = Path(target) / "tokenizer.json", dflash_of(config).get("mask_token_id")
    if not path.is_file() or not is_count(mask, 0):
        return []
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        added = {token["id"] for token in tokenizer.get("added_tokens", [])}
        vocab = tokenizer["model"]["vocab"]
        words = {i: w for w, i in vocab.items()} if isinstance(vocab, dict) else dict(enumerate(vocab))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [warn(f"{path} cannot be read", "the mask token was not looked up")]
    if mask in added or mask not in words:
        return []
    return [warn(f"mask token {mask} is the word {words[mask]!r}", "right only if no text holds it")]


def summary(findings: list[Finding]) -> str:
    """`FAIL  2 break serving, 1 to look at, 14 fine`: the worst verdict first."""
    counts = Counter(finding.verdict for finding in findings)
    worst = next((verdict for verdict in (FAIL, WARN) if counts[verdict]), OK)
    return f"{worst:<4}  {counts[FAIL]} break serving, {counts[WARN]} to look at, {counts[OK]} fine"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.verify",
        description="Check a DFlash drafter in the z-lab layout as vLLM, SGLang and z-lab's code read it.",
        epilog="exit codes: 0 nothing breaks serving, 1 something does, 2 usage",
    )
    parser.add_argument("folder", type=Path, help="holds config.json and the safetensors")
    parser.add_argument("--target", metavar="MODEL", help="folder of the target model, to compare with")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a hostile file may hold what no terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        findings = verify(args.folder, args.target)
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 2
    failed = any(finding.verdict == FAIL for finding in findings)
    if args.json:
        document = {"schema": 1, "folder": str(args.folder), "target": args.target, "ok": not failed}
        print(json.dumps(document | {"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(*findings, f"{summary(findings)}  {args.folder}", sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
