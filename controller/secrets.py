"""Secrets are named by reference in the inventory: no file of ours, no argument and no record holds one.

They are read here when a run starts, travel in the request on stdin, and become the trainer's environment.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from controller.errors import PreflightFailed
from controller.inventory import Box

KEYRING_USER = "pctrun"  # of a reference that names none


def private(box: Box) -> dict[str, Any]:
    """What a run gets beside its arguments; raises PreflightFailed when a reference leads nowhere."""
    found: dict[str, Any] = {}
    if box.secrets:
        found["environment"] = environment(box)
    if box.notify and box.notify.by == "container":
        found["notify"] = _notify(box)
    return found


def _notify(box: Box) -> dict[str, Any]:
    """What the notifier beside the run must know, and itself as a program."""
    from controller import (
        notify_program,
        notify_send,
    )  # only for those who ask for it: a dozen files are read

    assert box.notify
    addresses = urls(box)
    return {
        "urls": addresses,
        "when": box.notify.when,
        "box": box.label,
        "gpus": box.gpus,
        "vmid": box.vmid,
        "least_python": notify_program.LEAST_PYTHON,
        "wants_apprise": sorted(
            {notify_send.scheme(url) for url in addresses if notify_send.needs_apprise(url)}
        ),
        "program": notify_program.packed(),
    }


def environment(box: Box) -> dict[str, str]:
    """The values of the box's `secrets:` by name; raises PreflightFailed for those that are missing."""
    return _all({f"secret {name}": reference for name, reference in box.secrets.items()}, "secret ", box)


def readable(box: Box) -> list[str]:
    """The values that can be read now: what a message must not hold."""
    found = []
    for reference in box.secrets.values():
        with contextlib.suppress(PreflightFailed):
            found.append(read(reference))
    return found


def urls(box: Box) -> list[str]:
    """The addresses of the box's `notify:`; raises PreflightFailed for those that are missing."""
    named = {f"address {number}": url for number, url in enumerate(box.notify.urls, 1)} if box.notify else {}
    found = _all(named, "", box)
    for name, url in found.items():
        if "://" not in url:
            mend = "an address begins with what it is: json://, slack://, mailtos://"
            raise PreflightFailed(f"{name} of box '{box.name}' is no address", mend, kind="secret")
    return list(found.values())


def _all(wanted: dict[str, str], prefix: str, box: Box) -> dict[str, str]:
    """The values of named references; one error tells of all that are missing."""
    found: dict[str, str] = {}
    missing: list[tuple[str, str]] = []
    for name, reference in wanted.items():
        try:
            found[name.removeprefix(prefix)] = read(reference)
        except PreflightFailed as error:
            missing.append((f"{name} of box '{box.name}': {error.message}", error.hint))
    if missing:
        more = [text for text, _ in missing[1:]]
        raise PreflightFailed(*missing[0], kind="secret", evidence=more)
    return found


def read(reference: str) -> str:
    """The value behind `env:NAME`, `keyring:SERVICE[/USER]` or `file:PATH`; raises PreflightFailed.

    No message carries a value: they go to screens and into `--json`.
    """
    kind, _, place = reference.partition(":")
    value = {"env": _variable, "keyring": _keyring, "file": _file}[kind](place)
    if "\0" in value:
        raise PreflightFailed(f"{reference} holds a NUL byte, which no variable can", kind="secret")
    return value


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        state = "is not set" if value is None else "is empty"
        raise PreflightFailed(f"the environment variable {name} {state}", f"export {name}=…", kind="secret")
    return value


def _file(name: str) -> str:
    """A file's text without its last line end. Others must not be able to read it, as ssh wants of a key."""
    path = Path(name).expanduser()
    try:
        facts = path.stat()
        open_to = facts.st_mode & (0o077 if facts.st_uid == os.getuid() else 0o007)
        if not stat.S_ISREG(facts.st_mode):
            raise PreflightFailed(f"{path} is not a file", "name a file that holds the value", kind="secret")
        if open_to:
            mode = f"{stat.S_IMODE(facts.st_mode):04o}"
            raise PreflightFailed(f"others may read {path} (mode {mode})", f"chmod 600 {path}", kind="secret")
        value = path.read_text("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise PreflightFailed(
            f"{path} cannot be read: {error.strerror}",
            f"put the value there, then chmod 600 {path}",
            kind="secret",
        ) from None
    except UnicodeDecodeError:
        raise PreflightFailed(
            f"{path} is not UTF-8 text", "name a file that holds the value", kind="secret"
        ) from None
    if not value:
        raise PreflightFailed(f"{path} is empty", "put the value there", kind="secret")
    return value


def _keyring(place: str) -> str:
    service, _, user = place.rpartition("/") if "/" in place else (place, "", KEYRING_USER)
    keyring: Any
    try:
        import keyring  # optional, and a fifth of a second
        import keyring.errors
    except ImportError:
        raise PreflightFailed(
            f"keyring:{place} needs the package keyring, which is not installed here",
            "pip install keyring, or name another place: env:NAME, file:PATH",
            kind="secret",
        ) from None
    mend = f"keyring set {service} {user}"
    try:
        value = keyring.get_password(service, user)
    except keyring.errors.KeyringError as error:
        why = str(error).split("\n")[0] or type(error).__name__
        raise PreflightFailed(
            f"the keyring does not answer: {why}", "unlock it, or name env:NAME or file:PATH", kind="secret"
        ) from None
    if not value:
        raise PreflightFailed(f"the keyring has nothing for {user} of {service}", mend, kind="secret")
    return str(value)
