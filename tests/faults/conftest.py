"""One house a file: a box, a way to it that breaks, a release, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agent.conftest import Box, make_box, remove_box

from .house import House, open_house


@pytest.fixture(scope="module")
def built() -> Iterator[House]:
    """With a release in it."""
    with open_house() as house:
        said = house.type("deploy")
        assert said.code == 0, said
        yield house


@pytest.fixture
def house(built: House) -> Iterator[House]:
    """The same, with a whole way; what a test left running is stopped."""
    built.wire.heal()
    yield built
    built.settle()


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    """A container of the agent's tests, without SSH, with a release in it."""
    made = make_box()
    try:
        assert made.deploy().result["outcome"] == "deployed"
        yield made
    finally:
        remove_box(made)
