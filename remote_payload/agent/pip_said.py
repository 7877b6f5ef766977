"""Of pip's hundred lines a person needs one: which package it did not find, and where that may be had."""

from __future__ import annotations

import re

_MISSING = re.compile(r"^ERROR: No matching distribution found for (\S+)", re.MULTILINE)
# A package that pip finds nowhere is to it a conflict, as soon as any constraint names the package, too.
_CONFLICT = re.compile(
    r"^ERROR: Cannot install (\S+==\S+) because these package versions have conf", re.MULTILINE
)
_CONSTRAINT = re.compile(r"^ +The user requested \(constraint\) (\S+)", re.MULTILINE)
_UNREACHABLE = "after connection broken by"
_SEND = "send the wheels: --wheelhouse FOLDER"


def explain(said: str) -> tuple[str, str] | None:
    """What is missing, and the mend; None where pip failed for another reason."""
    found = _MISSING.search(said) or _CONFLICT.search(said)
    if found is None:
        return None
    package = found.group(1)
    if _UNREACHABLE in said:
        return f"no package index that can be reached has {package}", f"the network, pip.conf, or {_SEND}"
    words, mend = f"no package index here has {package}", ""
    if "+" in package:
        name = "PyTorch's" if package.startswith("torch") else "its maker's"
        mend = f"a version with a + lies on {name} own index: "
    mend += f"name one that has it in a copy of the lock (--extra-index-url URL) or in pip.conf, or {_SEND}"
    forbids = _CONSTRAINT.findall(said)
    if forbids:
        words += f", or the constraint {', '.join(forbids)} forbids it"
        mend += "; constraints come from PIP_CONSTRAINT or pip.conf"
    return words, mend
