"""What a file says becomes a checked record, or complaints that each name their place.

A framework did this before: its import took 85 ms, a third of a command's start.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

Place = tuple[str | int, ...]

_TYPES = {str: "a valid string", bool: "a valid boolean", int: "a valid integer", float: "a valid number"}


_EXACT = 2**53  # from here on a float skips whole numbers, and a YAML file can hold one that no float reaches


class Complaint(NamedTuple):
    """One mistake. `kind`: unknown (a key), missing (a key), name (a key that is no text), mapping (wanted
    one), value (of the wrong type or size: `wish` is what it should be) or rule (broken: `wish` says how)."""

    place: Place
    kind: str
    wish: str = ""
    value: Any = None


class Between(NamedTuple):
    """For `Annotated`: the least and the greatest value."""

    low: float
    high: float = float("inf")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """A frozen set of typed keys, as its class body declares them; keys without a default are needed.

    Types: str, bool, int, float, Any, Literal, another record, list[…], dict[str, …], each with `| None`.
    `Annotated[type, …]` adds `Between` or functions that raise ValueError with a rule that the value breaks;
    `check` does that for the whole. Nothing is converted but an int where a float is wanted.
    `given` holds the names of the keys that were given, a default's value or not.
    """

    given: frozenset[str]

    def __init__(self, **values: Any) -> None:
        """Raises ValueError with the first complaint."""
        complaints: list[Complaint] = []
        _fill(self, values, (), complaints)
        if complaints:
            raise ValueError(complaints[0])

    def check(self) -> None:
        """Raise ValueError with the rule that the whole breaks."""

    def as_dict(self) -> dict[str, Any]:
        """Every key and its value, records as mappings."""
        return {name: _plain(getattr(self, name)) for name in fields(type(self))}

    def replace(self, **changes: Any) -> Self:
        """The same with other values."""
        return type(self)(**{name: getattr(self, name) for name in self.given} | changes)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.as_dict() == getattr(other, "as_dict", dict)()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


_fields: dict[type, dict[str, Any]] = {}


def fields(kind: type[Record]) -> dict[str, Any]:
    """The keys of a record and their types."""
    if kind not in _fields:
        hints = get_type_hints(kind, include_extras=True)
        _fields[kind] = {name: hint for name, hint in hints.items() if name != "given"}
    return _fields[kind]


def read(kind: type[Record], value: object) -> tuple[Any, list[Complaint]]:
    """The record that `value` describes, or None with all that is wrong with it."""
    complaints: list[Complaint] = []
    made = _record(kind, value, (), complaints)
    return (None, complaints) if complaints else (made, [])


def _record(kind: type[Record], value: object, place: Place, found: list[Complaint]) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        found.append(Complaint(place, "mapping", value=value))
        return None
    made = kind.__new__(kind)
    _fill(made, value, place, found)
    return made


def _fill(record: Record, given: Mapping[Any, Any], place: Place, found: list[Complaint]) -> None:
    kind, before = type(record), len(found)
    hints, values = fields(kind), {}
    for name, each in given.items():
        if name in hints:
            values[name] = _checked(hints[name], each, (*place, name), found)
        else:
            found.append(Complaint((*place, name), "unknown"))
    for name in hints.keys() - given.keys():
        if hasattr(kind, name):
            values[name] = copy.copy(getattr(kind, name))
        else:
            found.append(Complaint((*place, name), "missing"))
    if len(found) == before:
        record.__dict__.update(values, given=frozenset(given))
        _obeys(lambda whole: whole.check(), record, place, found)


def _checked(hint: Any, value: Any, place: Place, found: list[Complaint]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    before = len(found)
    if origin is Annotated:
        made = _checked(arguments[0], value, place, found)
        for rule in arguments[1:] if len(found) == before else ():
            if not isinstance(rule, Between):
                _obeys(rule, made, place, found)
            elif not made >= rule.low:
                found.append(Complaint(place, "value", f"greater than or equal to {rule.low}", value))
            elif made > rule.high:
                found.append(Complaint(place, "value", f"less than or equal to {rule.high}", value))
        return made
    if origin in (Union, types.UnionType):
        [wanted] = [each for each in arguments if each is not types.NoneType]
        return None if value is None else _checked(wanted, value, place, found)
    if origin is Literal:
        if value not in arguments:
            wish = f"{', '.join(map(repr, arguments[:-1]))} or {arguments[-1]!r}"
            found.append(Complaint(place, "value", wish, value))
        return value
    if origin is dict:
        return _mapping(arguments[1], value, place, found)
    if origin is list:
        if not isinstance(value, list):
            found.append(Complaint(place, "value", "a valid list", value))
            return None
        return [_checked(arguments[0], each, (*place, at), found) for at, each in enumerate(value)]
    if hint is Any:
        return value
    if issubclass(hint, Record):
        return _record(hint, value, place, found)
    if type(value) is hint:
        return value
    if hint is float and type(value) is int and abs(value) < _EXACT:
        return float(value)
    found.append(Complaint(place, "value", _TYPES[hint], value))
    return None


def _mapping(hint: Any, value: Any, place: Place, found: list[Complaint]) -> Any:
    if not isinstance(value, Mapping):
        found.append(Complaint(place, "mapping", value=value))
        return None
    found += [Complaint((*place, name), "name") for name in value if not isinstance(name, str)]
    return {name: _checked(hint, each, (*place, name), found) for name, each in value.items()}


def _obeys(rule: Callable[[Any], object], value: Any, place: Place, found: list[Complaint]) -> None:
    try:
        rule(value)
    except ValueError as error:
        found.append(Complaint(place, "rule", str(error)))


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.as_dict()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
