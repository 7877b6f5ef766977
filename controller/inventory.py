"""One validated file names every box, because a typo in it must cost a line of text and not an evening.

Every complaint is `inventory.yaml:LINE: what`, an unknown key with the nearest valid name.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from controller.errors import InventoryError, Usage

FILE_NAME = "inventory.yaml"
CURRENT_ENVIRONMENT = "env:current"  # the agent knows where that is
PROJECT = Path(__file__).resolve().parent.parent

Place = tuple[str | int, ...]


def is_plain(value: Any) -> bool:
    """Whether JSON can carry it: YAML also knows dates and what is not a number."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Roots(_Strict):
    """The four folders that pctrun owns in a container."""

    opt: str = "/opt/pctrun"
    lib: str = "/var/lib/pctrun"
    cache: str = "/var/cache/pctrun"
    run: str = "/run/pctrun"

    @field_validator("*")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/") or value.strip("/") == "":
            raise ValueError("must be an absolute path of its own")
        return value


class Box(_Strict):
    """A Proxmox host reached by SSH and one container on it; a sandbox brings its own host and keys."""

    name: str = Field(default="", exclude=True)
    sandbox: bool = False
    host: str | None = None
    user: str = "root"
    port: int = Field(default=22, ge=1, le=65535)
    identity_file: str | None = None
    known_hosts: str = "~/.ssh/known_hosts"
    host_key: str | None = None
    proxy_jump: str | None = None
    sudo: bool = False
    vmid: int = Field(ge=100)
    agent_python: str = "/usr/bin/python3"
    python: str = CURRENT_ENVIRONMENT
    roots: Roots = Roots()
    recipe: str
    overrides: dict[str, Any] = {}
    grace_s: float = Field(default=120.0, ge=0)
    gpus: int | None = Field(default=None, ge=0)

    @field_validator("host_key")
    @classmethod
    def _fingerprint(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}=?", value):
            raise ValueError("must be a fingerprint as `ssh-keygen -lf KEY.pub` prints it: SHA256:…")
        return value

    @field_validator("overrides")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        """They travel as JSON."""
        for key, each in value.items():
            if not is_plain(each):
                raise ValueError(f"{key}: {each} is neither text nor number nor a list of them: quote it")
        return value

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        ways = self.model_fields_set & {
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
        return self

    @property
    def label(self) -> str:
        """How screens name it: `box/vmid`."""
        return f"{self.name}/{self.vmid}"


class Inventory(_Strict):
    """`default` is the box of every task that is not told another with --box."""

    default: str
    boxes: dict[str, Box]

    @model_validator(mode="after")
    def _default_exists(self) -> Self:
        if not self.boxes:
            raise ValueError("there is no box under 'boxes:'")
        if self.default not in self.boxes:
            raise ValueError(f"default names no box: '{self.default}'{_nearest(self.default, self.boxes)}")
        return self

    def pick(self, names: Sequence[str]) -> list[Box]:
        """The boxes of `names`, each once, in that order; the default box when there are none."""
        wanted = list(dict.fromkeys(names)) or [self.default]
        for name in wanted:
            if name not in self.boxes:
                raise Usage(
                    f"no box '{name}' in the inventory{_nearest(name, self.boxes)}",
                    f"boxes: {', '.join(self.boxes)}",
                )
        return [self.boxes[name] for name in wanted]


def find() -> Path:
    """`PCTRUN_INVENTORY`, else the nearest inventory.yaml upward from here, else the project's own."""
    named = os.environ.get("PCTRUN_INVENTORY")
    if named:
        return Path(named).expanduser()
    here = Path.cwd()
    for folder in (here, *here.parents, PROJECT):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    raise InventoryError(
        f"no {FILE_NAME} in {here} or above it", "or name one: PCTRUN_INVENTORY=/path/to/file"
    )


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
    try:
        return Inventory.model_validate(raw)
    except ValidationError as error:
        found = sorted({_complaint(detail, lines) for detail in error.errors()})
        texts = [f"{path.name}:{line}: {text}" for line, text in found]
        raise InventoryError(texts[0], evidence=texts[1:]) from None


def _parse(text: str, file_name: str) -> tuple[Any, dict[Place, int]]:
    """The document and the line of every key. YAML keeps the last of two equal keys; we refuse."""
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        lines: dict[Place, int] = {}
        if node is None:
            lines[()] = 1
        else:
            _walk(node, (), lines, file_name)
        return yaml.safe_load(text), lines
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


def _complaint(detail: ErrorDetails, lines: Mapping[Place, int]) -> tuple[int, str]:
    place: Place = detail["loc"]
    line = next(lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in lines)
    if place[-1:] == ("[key]",):
        return line, f"the name of {_named(place[:-1])} should be text: quote it"
    wish = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    match detail["type"]:
        case "extra_forbidden":
            return line, f"unknown key {_named(place)}{_nearest(str(place[-1]), _valid_keys(place[:-1]))}"
        case "missing":
            return line, f"{_named(place[:-1])} needs '{place[-1]}:'"
        case "value_error":
            return line, f"{_named(place)}: {wish}"
        case "model_type" | "dict_type":
            return line, f"{_named(place)} must be a mapping of keys to values, not {_shown(detail)}"
        case _:
            return line, f"{_named(place)} should be {wish[0].lower()}{wish[1:]}, not {_shown(detail)}"


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
        return Inventory.model_fields
    if place[-1] == "roots":
        return Roots.model_fields
    return set(Box.model_fields) - {"name"}


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _shown(detail: ErrorDetails) -> str:
    value = detail["input"]
    return "nothing" if value is None else repr(value)[:60]
