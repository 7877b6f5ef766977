"""How the real pct reads its arguments: options anywhere, one `--` eaten, names abbreviated."""

from __future__ import annotations

import errno

from .host import Failure

TRUE_WORDS = ("1", "on", "yes", "true")
FALSE_WORDS = ("0", "off", "no", "false")
MAX_VMID = 999_999_999


def split(arguments: list[str], kinds: dict[str, str], usage: str) -> tuple[list[str], dict[str, str]]:
    """Separate positional arguments from options; `kinds` maps an option's name to `boolean` or `string`.

    Any `-x` before the first `--` is taken as an option of pct, wherever it stands. That is why a command
    with dashes needs the `--`. A boolean takes the next word as its value unless that starts with a dash.
    """
    words = list(arguments)
    positional: list[str] = []
    options: dict[str, str] = {}
    unknown: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            positional += words
            break
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        given, equals, value = word.lstrip("-").partition("=")
        name = _match(given.lower(), kinds)
        if name is None:
            unknown.append(f"Unknown option: {given.lower()}")
        elif equals:
            options[name] = value
        elif words and not words[0].startswith("-"):
            options[name] = words.pop(0)
        elif kinds[name] == "boolean":
            options[name] = "1"
        else:
            unknown.append(f"Option {name} requires an argument")
    if unknown:
        raise Failure(errno.ENOENT, "\n".join([*unknown, "400 unable to parse option", usage]))
    return positional, options


def _match(given: str, kinds: dict[str, str]) -> str | None:
    if given in kinds:
        return given
    matches = [name for name in kinds if name.startswith(given)] if given else []
    return matches[0] if len(matches) == 1 else None


def vmid_of(text: str, usage: str) -> int:
    """A container's number, or the refusal of the real parameter check."""
    if not text.isascii() or not text.isdigit():
        raise invalid("vmid", f"type check ('integer') failed - got '{text}'", usage)
    if not 100 <= int(text) <= MAX_VMID:
        raise invalid("vmid", f"value must be between 100 and {MAX_VMID}", usage)
    return int(text)


def boolean(options: dict[str, str], name: str, default: bool, usage: str) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if value.lower() in TRUE_WORDS:
        return True
    if value.lower() in FALSE_WORDS:
        return False
    raise invalid(name, f"type check ('boolean') failed - got '{value}'", usage)


def seconds(options: dict[str, str], name: str, default: int, usage: str) -> int:
    value = options.get(name, str(default))
    if not value.isascii() or not value.isdigit():
        raise invalid(name, f"type check ('integer') failed - got '{value}'", usage)
    return int(value)


def invalid(name: str, reason: str, usage: str) -> Failure:
    return Failure(errno.ENOENT, f"400 Parameter verification failed.\n{name}: {reason}\n{usage}")
