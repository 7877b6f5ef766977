"""A lock says exactly what an environment holds: one version a line, nothing that another day resolves anew.

It is a requirements file of pip, kept to `NAME==VERSION` (with markers and hashes), index addresses, and
`--no-binary NAME` for what is built here from its source. A line `# python: 3.12` binds it to that version.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from agent.call import Refusal

_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?P<extras>\[[A-Za-z0-9,._ -]*\])?\s*==\s*"
    r"(?P<version>[A-Za-z0-9.!+_-]+)\s*(?P<rest>(?:;|--hash=).*)?"
)
_PYTHON = re.compile(r"#\s*python:\s*(\d+\.\d+)\s*")
_COMMENT = re.compile(r"(^|\s)#.*")


class Pin(NamedTuple):
    """One line: `name` as packages compare it (small, with dashes), `line` for pip."""

    name: str
    version: str
    line: str


class Lock(NamedTuple):
    pins: tuple[Pin, ...]
    sources: tuple[str, ...]  # names that are built here
    options: tuple[str, ...]  # for pip: the indexes
    python: str | None

    def identity(self, facts: dict[str, str | None]) -> str:
        """16 hex digits over what is installed and where (`facts`: interpreter, machine, architecture)."""
        parts = [sorted(pin.line for pin in self.pins), sorted(self.sources), facts]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def wheels(self) -> list[Pin]:
        return [pin for pin in self.pins if pin.name not in self.sources]

    def built(self) -> list[Pin]:
        return [pin for pin in self.pins if pin.name in self.sources]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> Lock:
    """The lock, or a `usage` refusal that names the first line that does not pin."""
    pins: dict[str, Pin] = {}
    sources: list[str] = []
    options: list[str] = []
    python = None
    for at, line in _lines(text):
        bound = _PYTHON.fullmatch(line)
        if bound:
            python = bound.group(1)
            continue
        line = _COMMENT.sub("", line).strip()
        if not line:
            continue
        if line.startswith("-"):
            _option(at, line, sources, options)
            continue
        found = _PIN.fullmatch(line)
        if found is None:
            raise _refusal(at, f"does not pin one version: {line:.80}", "NAME==VERSION, as `pip freeze` says")
        name = canonical(found.group("name"))
        if name in pins:
            raise _refusal(at, f"pins {name} a second time", "keep one")
        pins[name] = Pin(name, found.group("version"), " ".join(line.split()))
    unknown = sorted(set(sources) - set(pins))
    if unknown:
        raise Refusal("usage", f"the lock builds {unknown[0]} from source, but pins no version of it", "")
    if not pins:
        raise Refusal("usage", "the lock pins nothing", "one NAME==VERSION a line")
    return Lock(tuple(pins.values()), tuple(dict.fromkeys(sources)), tuple(options), python)


def _lines(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers, those that a backslash continues put together."""
    joined: list[tuple[int, str]] = []
    open_ = False
    for number, line in enumerate(text.splitlines(), 1):
        part = line.strip()
        more = part.endswith("\\")
        part = part[:-1].rstrip() if more else part
        if open_:
            joined[-1] = (joined[-1][0], f"{joined[-1][1]} {part}")
        else:
            joined.append((number, part))
        open_ = more
    return joined


def _option(at: int, line: str, sources: list[str], options: list[str]) -> None:
    name, _, value = line.replace("=", " ", 1).partition(" ")
    value = value.strip()
    if name == "--no-binary" and value and not value.startswith(":"):
        sources.extend(canonical(each) for each in value.split(","))
    elif name in ("--index-url", "-i", "--extra-index-url") and value:
        if urlsplit(value).username is not None:
            mend = "put the login into the container's ~/.netrc or pip.conf"
            raise _refusal(at, "holds the login of an index; locks are copied and recorded", mend)
        options.extend((name, value))
    else:
        raise _refusal(
            at,
            f"has an option that is not taken: {line:.80}",
            "--index-url, --extra-index-url and --no-binary NAME are",
        )


def _refusal(at: int, what: str, mend: str) -> Refusal:
    return Refusal("usage", f"line {at} of the lock {what}", mend)
