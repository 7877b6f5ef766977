"""Records from a file: what is taken, what is refused, and that each refusal names its place."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from controller import records
from controller.records import Between, Complaint, Record


def even(value: int) -> None:
    if value % 2:
        raise ValueError("must be even")


class Inner(Record):
    on: list[Literal["a", "b"]] = []  # noqa: RUF012 - each record copies it
    share: Annotated[float, Between(0, 1)] = 0.5


class Outer(Record):
    number: Annotated[int, Between(2), even]
    text: str | None = None
    flag: bool = False
    inner: Inner = Inner()
    table: dict[str, Inner] = {}  # noqa: RUF012 - each record copies it
    anything: Any = None

    def check(self) -> None:
        if self.flag and not self.text:
            raise ValueError("a flag needs a text")


def test_a_whole_record_with_what_was_given_and_what_was_not() -> None:
    value = {"number": 4, "table": {"x": {"on": ["b"], "share": 1}}, "anything": [1, {"a": None}]}
    made, complaints = records.read(Outer, value)
    assert complaints == []
    assert (made.number, made.text, made.inner, made.table["x"].share) == (4, None, Inner(), 1.0)
    assert made.given == {"number", "table", "anything"}
    assert made.as_dict()["table"] == {"x": {"on": ["b"], "share": 1.0}}
    assert records.read(Outer, made.as_dict())[0] == made


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({}, Complaint(("number",), "missing")),
        ({"number": 4, "numbr": 1}, Complaint(("numbr",), "unknown")),
        ({"number": True}, Complaint(("number",), "value", "a valid integer", True)),
        ({"number": 4.0}, Complaint(("number",), "value", "a valid integer", 4.0)),
        ({"number": 0}, Complaint(("number",), "value", "greater than or equal to 2", 0)),
        ({"number": 3}, Complaint(("number",), "rule", "must be even")),
        ({"number": 4, "inner": {"share": 10**400}}, "a valid number"),
        ({"number": 4, "flag": True}, Complaint((), "rule", "a flag needs a text")),
        ({"number": 4, "inner": 1}, Complaint(("inner",), "mapping", value=1)),
        ({"number": 4, "inner": {"share": float("nan")}}, "greater than or equal to 0"),
        (
            {"number": 4, "inner": {"share": 2}},
            Complaint(("inner", "share"), "value", "less than or equal to 1", 2),
        ),
        ({"number": 4, "inner": {"on": "a"}}, Complaint(("inner", "on"), "value", "a valid list", "a")),
        (
            {"number": 4, "inner": {"on": ["a", "c"]}},
            Complaint(("inner", "on", 1), "value", "'a' or 'b'", "c"),
        ),
        ({"number": 4, "table": {7: {}}}, Complaint(("table", 7), "name")),
        ({"number": 4, "table": {"x": {"of": 1}}}, Complaint(("table", "x", "of"), "unknown")),
        ([1], Complaint((), "mapping", value=[1])),
    ],
)
def test_each_mistake_has_its_place(value: object, complaint: Complaint | str) -> None:
    made, complaints = records.read(Outer, value)
    assert made is None
    if isinstance(complaint, str):
        assert [each.wish for each in complaints] == [complaint]
    else:
        assert complaints == [complaint]


def test_all_mistakes_are_told_at_once() -> None:
    _, complaints = records.read(Outer, {"text": 1, "flag": "yes", "inner": {"x": 1}})
    assert sorted(each.place for each in complaints) == [("flag",), ("inner", "x"), ("number",), ("text",)]


def test_a_record_is_frozen_checked_and_shares_no_default() -> None:
    made = Outer(number=4)
    with pytest.raises(AttributeError, match="frozen"):
        made.number = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match="must be even"):
        Outer(number=3)
    made.table["x"] = Inner()
    assert Outer(number=4).table == {}
    changed = made.replace(text="t")
    assert (changed.number, changed.text, changed.given) == (4, "t", {"number", "text"})
