"""YAML into frozen dataclasses, remembering each key's line, so that a complaint names place and mend."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import Refusal


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its base-60 numbers, which make 303 out of the topology 5:3."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:int"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9][0-9_]*\Z"), list("-+0123456789")
)


@dataclass
class Tree:
    """Nested keys of a recipe file. `lines` maps a dotted key to the place where it was written."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, str]

    def where(self, key: str) -> str:
        """`file:line` of `key`, or of the nearest section that holds it, or the file."""
        while key:
            if key in self.lines:
                return self.lines[key]
            key = key.rpartition(".")[0]
        return str(self.path)

    def override(self, key: str, value: Any) -> None:
        *sections, last = key.split(".")
        at, walked = self.values, ""
        place = f"override {key}={value}"
        for section in sections:
            walked = f"{walked}.{section}".lstrip(".")
            if section not in at:
                self.lines[walked] = place
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise Refusal(f"override {key}: {walked} is a value, not a section")
        at[last] = value
        self.lines[key] = place


def read_tree(path: Path) -> Tree:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise Refusal(f"{path}:{line}: not YAML: {error.problem}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # no text, or nested without end
        raise Refusal(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(root, yaml.MappingNode):
        raise Refusal(f"{path}:1: a recipe is a mapping of sections: see recipes/")
    lines: dict[str, str] = {}
    return Tree(path, _mapping(root, "", path, lines), lines)


def _mapping(node: yaml.MappingNode, prefix: str, path: Path, lines: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise Refusal(f"{place}: a key is a word: write section and value, as in recipes/")
        if key in lines:
            raise Refusal(f"{place}: {key} is written twice, first at {lines[key]}: keep one")
        lines[key] = place
        if isinstance(value_node, yaml.MappingNode):
            values[key_node.value] = _mapping(value_node, f"{key}.", path, lines)
        else:
            try:
                values[key_node.value] = _plain(value_node)
            except (ValueError, yaml.YAMLError) as error:
                problem = getattr(error, "problem", None) or error
                raise Refusal(f"{place}: {key} is no value ({problem}): write text in quotes") from None
    return values


def _plain(node: yaml.Node) -> Any:
    return _Loader("").construct_object(node, deep=True)


def parse_overrides(overrides: object) -> dict[str, Any]:
    """{"a.b": value} or ["a.b=value"]; text values are read as YAML scalars, so "50" is a number."""
    if not overrides:
        return {}
    if isinstance(overrides, list):
        pairs = {}
        for item in overrides:
            key, equals, value = str(item).partition("=")
            if not equals or not all(key.strip().split(".")):
                raise Refusal(f"override {item!r}: write key=value, e.g. train.steps=50")
            pairs[key.strip()] = value
    elif isinstance(overrides, dict):
        pairs = {str(key): value for key, value in overrides.items()}
    else:
        raise Refusal('overrides are {"train.steps": 50} or ["train.steps=50"]')
    return {key: _scalar(key, value) if isinstance(value, str) else value for key, value in pairs.items()}


def _scalar(key: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, yaml.YAMLError, RecursionError):
        raise Refusal(f"override {key}={text:.60}: the value is not a YAML scalar") from None


def build(cls: type, tree: Tree, defaults: dict[str, Any] | None = None) -> Any:
    """An instance of the dataclass `cls` from `tree`; unknown keys, missing keys and wrong types are
    refused."""
    return _build(cls, {**(defaults or {}), **tree.values}, "", tree)


def _build(cls: type, values: dict[str, Any], prefix: str, tree: Tree) -> Any:
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            mend = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(sorted(names))}"
            raise Refusal(f"{tree.where(prefix + key)}: unknown key {prefix}{key}; {mend}")
    arguments: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        key = prefix + f.name
        if f.name not in values:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise Refusal(f"{tree.where(key)}: {key} is missing: write it")
        elif dataclasses.is_dataclass(hints[f.name]):
            if not isinstance(values[f.name], dict):
                raise Refusal(f"{tree.where(key)}: {key} is a section: write keys under it")
            arguments[f.name] = _build(hints[f.name], values[f.name], f"{key}.", tree)
        else:
            arguments[f.name] = _convert(values[f.name], hints[f.name], key, tree)
    return cls(**arguments)


def _convert(value: Any, hint: Any, key: str, tree: Tree) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:
        if isinstance(value, list):
            return tuple(_convert(v, typing.get_args(hint)[0], key, tree) for v in value)
    elif hint is str:
        if isinstance(value, bool):  # YAML 1.1 reads on and off as booleans
            return "on" if value else "off"
        if isinstance(value, str):
            return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 6e-4 as text
        except (ValueError, OverflowError):
            pass
    kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(hint, "a list")
    raise Refusal(f"{tree.where(key)}: {key} is {value!r}: it must be {kind}")
