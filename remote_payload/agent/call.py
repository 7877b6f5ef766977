"""One shape for what every verb is handed (the call) and one way for a verb to say no (the refusal)."""

from __future__ import annotations

import os
from typing import IO, Any, Dict, NamedTuple, Tuple

from agent.frames import Frames

Json = Dict[str, Any]
# What a verb accepts: name -> (type, default, one line of help). A null or missing value takes the default.
Args = Dict[str, Tuple[type, Any, str]]

DEFAULT_ROOTS = {
    "opt": "/opt/pctrun",
    "lib": "/var/lib/pctrun",
    "cache": "/var/cache/pctrun",
    "run": "/run/pctrun",
}


class Refusal(Exception):
    """An expected failure. `kind` is one of the contract's error kinds; `more` joins the error's JSON."""

    def __init__(self, kind: str, message: str, hint: str = "", **more: Any) -> None:
        super().__init__(message)
        self.kind, self.message, self.hint, self.more = kind, message, hint, more


class Roots(NamedTuple):
    """The four folders that pctrun owns in the container, as real paths, so that they compare as text."""

    opt: str
    lib: str
    cache: str
    run: str

    @property
    def releases(self) -> str:
        return os.path.join(self.opt, "releases")

    @property
    def runs(self) -> str:
        return os.path.join(self.lib, "runs")


class Call(NamedTuple):
    """One request: `args` are checked, `stdin` stands behind the request line.

    `private` is for the run alone: it comes into no answer, no record and no error.
    """

    verb: str
    nonce: str
    args: Json
    roots: Roots
    operator: Json
    frames: Frames
    stdin: IO[bytes]
    private: Json


def parse_roots(given: Any) -> Roots:
    """Absolute folders, or a usage refusal that names the wrong one."""
    if not isinstance(given, dict):
        raise Refusal("usage", "roots must be an object with opt, lib, cache and run")
    unknown = sorted(set(given) - set(DEFAULT_ROOTS))
    if unknown:
        raise Refusal(
            "usage", f"there is no root named {unknown[0]}", "the roots are opt, lib, cache and run"
        )
    paths = {**DEFAULT_ROOTS, **given}
    for name, path in paths.items():
        if not isinstance(path, str) or not path.startswith("/") or os.path.realpath(path) == "/":
            raise Refusal("usage", f"root {name} is {path!r}", "a root is an absolute folder below /")
    return Roots(**{name: os.path.realpath(path) for name, path in paths.items()})


def check_args(verb: str, accepted: Args, given: Any) -> Json:
    """Every accepted argument with its value or default; refuses unknown names and wrong types."""
    if not isinstance(given, dict):
        raise Refusal("usage", f"the arguments of {verb} must be a JSON object")
    unknown = sorted(set(given) - set(accepted))
    if unknown:
        raise Refusal(
            "usage", f"{verb} takes no argument {unknown[0]!r}", f"it takes {', '.join(accepted) or 'none'}"
        )
    checked: Json = {}
    for name, (kind, default, _) in accepted.items():
        value = given.get(name)
        if value is None:
            value = default
        elif kind is float and type(value) is int:
            value = float(value)
        elif kind is not object and type(value) is not kind:
            raise Refusal("usage", f"{verb}: {name} must be {_WORDS[kind]}, not {value!r:.80}")
        if kind in (int, float) and value is not None and not 0 <= value < 1e15:
            raise Refusal("usage", f"{verb}: {name} must be 0 or more, not {value}")
        checked[name] = value
    return checked


_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
