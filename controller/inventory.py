"""One validated file names every box, because a typo in it must cost a line of text and not an evening.

Every complaint is `inventory.yaml:LINE: what`, an unknown key with the nearest valid name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from controller import records
from controller.errors import InventoryError, Usage
from controller.project import FILE_NAME, inventory_path
from controller.project import PROJECT as PROJECT
from controller.records import Between, Complaint, Place, Record

CURRENT_ENVIRONMENT = "env:current"  # the agent knows where that is


def is_plain(value: Any) -> bool:
    """Whether JSON can carry it: YAML also knows dates and what is not a number."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _absolute(value: str) -> None:
    if not value.startswith("/") or value.strip("/") == "":
        raise ValueError("must be an absolute path of its own")


def _fingerprint(value: str) -> None:
    if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}=?", value):
        raise ValueError("must be a fingerprint as `ssh-keygen -lf KEY.pub` prints it: SHA256:…")


def _all_plain(value: Mapping[str, Any]) -> None:
    """They travel as JSON."""
    for key, each in value.items():
        if not is_plain(each):
            raise ValueError(f"{key}: {each} is neither text nor number nor a list of them: quote it")


class Roots(Record):
    """The four folders that pctrun owns in a container."""

    opt: Annotated[str, _absolute] = "/opt/pctrun"
    lib: Annotated[str, _absolute] = "/var/lib/pctrun"
    cache: Annotated[str, _absolute] = "/var/cache/pctrun"
    run: Annotated[str, _absolute] = "/run/pctrun"


def _reference(value: str) -> None:
    """What is wrong is not repeated: a value that was put here itself must not come onto a screen."""
    if not re.fullmatch(r"(env|keyring|file):\S.*", value):
        raise ValueError("wants where the value is, not the value: env:NAME, keyring:SERVICE or file:PATH")


def _some(value: Sequence[str]) -> None:
    if not value:
        raise ValueError("needs one at least")


def _variables(value: Mapping[str, str]) -> None:
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"'{name}' cannot be the name of a variable")


class Notify(Record):
    """Where a run tells of itself (by reference: an address is a secret), of which words, and who sends."""

    urls: Annotated[list[Annotated[str, _reference]], _some]
    when: Annotated[list[Literal["crashed", "stalled", "degraded", "finished", "stopped"]], _some] = [  # noqa: RUF012
        "crashed",
        "stalled",
        "degraded",
        "finished",
    ]
    by: Literal["container", "watch"] = "container"


class Box(Record):
    """A Proxmox host reached by SSH and one container on it; a sandbox brings its own host and keys."""

    name: str = ""
    sandbox: bool = False
    host: str | None = None
    user: str = "root"
    port: Annotated[int, Between(1, 65535)] = 22
    identity_file: str | None = None
    known_hosts: str = "~/.ssh/known_hosts"
    host_key: Annotated[str, _fingerprint] | None = None
    proxy_jump: str | None = None
    sudo: bool = False
    vmid: Annotated[int, Between(100)]
    agent_python: str = "/usr/bin/python3"
    python: str = CURRENT_ENVIRONMENT
    roots: Roots = Roots()
    recipe: str
    overrides: Annotated[dict[str, Any], _all_plain] = {}  # noqa: RUF012 - each record copies it
    secrets: Annotated[dict[str, Annotated[str, _reference]], _variables] = {}  # noqa: RUF012
    notify: Notify | None = None
    grace_s: Annotated[float, Between(0)] = 120.0
    auto_restart: Annotated[int, Between(0, 100)] = 0
    gpus: Annotated[int, Between(0)] | None = None

    def check(self) -> None:
        ways = self.given & {
            "host",
            "user",
            "port",
            "identity_file",
            "known_hosts",
            "host_key",
            "proxy_jump",
            "sudo",
        }
        if self.sandbox and ways:
            raise ValueError(f"a sandbox box takes no {', '.join(sorted(ways))}: the sandbox brings its own")
        if not self.sandbox and not self.host:
            raise ValueError("needs host: (or sandbox: true)")

    @property
    def label(self) -> str:
        """How screens name it: `box/vmid`."""
        return f"{self.name}/{self.vmid}"

    @property
    def own(self) -> tuple[str, dict[str, Any]]:
        """Recipe and overrides: what a plain restart starts."""
        return self.recipe, self.overrides


class Inventory(Record):
    """`default` is the box of every task that is not told another with --box."""

    default: str
    boxes: dict[str, Box]

    def check(self) -> None:
        if not self.boxes:
            raise ValueError("there is no box under 'boxes:'")
        if self.default not in self.boxes:
            raise ValueError(f"default names no box: '{self.default}'{_nearest(self.default, self.boxes)}")

    def pick(self, names: Sequence[str], *, every: bool = False) -> list[Box]:
        """The boxes of `names`, each once, in that order; the default box when there are none.

        With `every` all of them, in the file's order.
        """
        if every and names:
            raise Usage(
                "--all and --box exclude each other", "name the boxes that are meant, or leave out --box"
            )
        wanted = list(self.boxes) if every else list(dict.fromkeys(names)) or [self.default]
        for name in wanted:
            if name not in self.boxes:
                raise Usage(
                    f"no box '{name}' in the inventory{_nearest(name, self.boxes)}",
                    f"boxes: {', '.join(self.boxes)}",
                )
        return [self.boxes[name] for name in wanted]


def find() -> Path:
    """Where it is; raises InventoryError when there is none."""
    path = inventory_path()
    if path is None:
        raise InventoryError(
            f"no {FILE_NAME} in {Path.cwd()} or above it",
            "pctrun init makes one here; PCTRUN_INVENTORY=/path/to/file names another",
        )
    return path


def load(path: Path | None = None) -> Inventory:
    """Read and validate; raises InventoryError with one line for each mistake, all of them at once."""
    path = path or find()
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        hint = "PCTRUN_INVENTORY names it" if os.environ.get("PCTRUN_INVENTORY") else ""
        raise InventoryError(f"{path} cannot be read: {error.strerror}", hint) from None
    except UnicodeDecodeError as error:
        raise InventoryError(f"{path.name}: not UTF-8: {error.reason} at byte {error.start}") from None
    raw, lines = _parse(text, path.name)
    if isinstance(raw, dict) and isinstance(raw.get("boxes"), dict):
        for name, entry in raw["boxes"].items():
            if isinstance(entry, dict):
                if "name" in entry:
                    line = lines.get(("boxes", name, "name"), 1)
                    raise InventoryError(
                        f"{path.name}:{line}: unknown key 'name' in box '{name}': its key is its name"
                    )
                raw["boxes"][name] = {**entry, "name": str(name)}  # not in place: an alias shares its entry
    made, complaints = records.read(Inventory, raw)
    if complaints:
        meant = {_meant(complaint.place) for complaint in complaints if complaint.kind == "unknown"}
        own = [each for each in complaints if each.kind != "missing" or each.place not in meant]
        found = sorted({_told(complaint, lines) for complaint in own})
        texts = [f"{path.name}:{line}: {text}" for line, text in found]
        raise InventoryError(texts[0], evidence=texts[1:])
    inventory: Inventory = made
    return inventory


def _parse(text: str, file_name: str) -> tuple[Any, dict[Place, int]]:
    """The document and the line of every key. YAML keeps the last of two equal keys; we refuse."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: dict[Place, int] = {}
        if node is None:
            return None, {(): 1}
        _walk(node, (), lines, file_name)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InventoryError(f"{file_name}:{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InventoryError(f"{file_name}:1: not YAML: {error}") from None
    except RecursionError:
        raise InventoryError(f"{file_name}:1: nested without end") from None


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], file_name: str) -> None:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _walk(child, (*place, index), lines, file_name)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = str(key.value)
        if name in seen:
            raise InventoryError(
                f"{file_name}:{line}: key '{name}' is here twice (first on line {seen[name]})"
            )
        seen[name] = line
        lines[(*place, name)] = line
        _walk(value, (*place, name), lines, file_name)


def _told(complaint: Complaint, lines: Mapping[Place, int]) -> tuple[int, str]:
    """Its line in the file, and what a person reads."""
    place, wish = complaint.place, complaint.wish
    line = next(lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in lines)
    match complaint.kind:
        case "name":
            return line, f"the name of {_named(place)} should be text: quote it"
        case "unknown":
            return line, f"unknown key {_named(place)}{_nearest(str(place[-1]), _valid_keys(place[:-1]))}"
        case "missing":
            return line, f"{_named(place[:-1])} needs '{place[-1]}:'"
        case "rule":
            return line, f"{_named(place)}: {wish}"
        case "mapping":
            return line, f"{_named(place)} must be a mapping of keys to values{_shown(complaint)}"
        case _:
            return line, f"{_named(place)} should be {wish}{_shown(complaint)}"


def _meant(place: Place) -> Place | None:
    """Where the valid key belongs that an unknown one was probably to be: it is not missing as well."""
    close = _closest(str(place[-1]), _valid_keys(place[:-1]))
    return (*place[:-1], close) if close else None


def _named(place: Place) -> str:
    """How a person would say where: `'roots.opt' in box 'lab'`."""
    if not place:
        return "the file"
    if place[0] != "boxes" or len(place) == 1:
        return f"'{'.'.join(map(str, place))}'"
    if len(place) == 2:
        return f"box '{place[1]}'"
    return f"'{'.'.join(map(str, place[2:]))}' in box '{place[1]}'"


def _valid_keys(place: Place) -> Iterable[str]:
    if not place:
        return records.fields(Inventory)
    if place[-1] in ("roots", "notify"):
        return records.fields(Roots if place[-1] == "roots" else Notify)
    return records.fields(Box).keys() - {"name"}


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = _closest(name, valid)
    return f"; did you mean '{close}'?" if close else ""


def _closest(name: str, valid: Iterable[str]) -> str:
    import difflib  # only for a mistake: 3 ms

    return next(iter(difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.5)), "")


def _shown(complaint: Complaint) -> str:
    """What stands there instead; nothing of it where it may be a secret that was put into the wrong file."""
    if complaint.value is not None and {"secrets", "urls"} & set(complaint.place):
        return ""
    return f", not {'nothing' if complaint.value is None else repr(complaint.value)[:60]}"
