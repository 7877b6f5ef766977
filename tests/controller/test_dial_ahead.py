"""A connection made ahead is the one that is used, its failure is told once, and nothing is started by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controller import embedded, links, sandbox
from controller.console import Console
from controller.errors import LoginRefused, Unreachable
from controller.inventory import Box

from .conftest import Proxy


def test_the_link_that_was_made_ahead_is_used(real_box: Callable[..., Box], proxy: Proxy) -> None:
    box = real_box(port=proxy.port)
    links.dial_ahead(box)
    ahead = links.get(box)
    links.dial_ahead(box)
    assert links.get(box) is ahead
    proxy.cut()
    links.drop(box)


def test_its_failure_is_told_once_and_then_it_is_tried_anew(real_box: Callable[..., Box]) -> None:
    box = real_box(identity_file="/nowhere/key")
    links.dial_ahead(box)
    slot = links._slot(box)
    failure = slot.failure
    with pytest.raises(LoginRefused, match="no key file") as caught:
        links.get(box)
    assert caught.value is failure
    with pytest.raises(LoginRefused, match="no key file") as caught:
        links.get(box)
    assert caught.value is not failure


def test_an_embedded_box_that_is_down_is_not_brought_up(box: Box) -> None:
    embedded.down()
    try:
        links.dial_ahead(box)
        assert not sandbox.is_up()
        with pytest.raises(Unreachable, match="taken down by hand"):
            links.get(box)
    finally:
        embedded.up(revive=True)
    links.dial_ahead(box)
    assert links.get(box).alive


def test_a_command_that_brings_it_up_again_says_so(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    embedded.down()
    try:
        assert links.wake(box, Console()).alive
        assert capsys.readouterr().err == "the sandbox was down, it is up again\n"
        links.wake(box, Console())
        assert capsys.readouterr().err == ""
    finally:
        embedded.up(revive=True)
