"""When the embedded box comes up by itself, and when not: a person's `sandbox.down` is remembered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from controller.errors import PctrunError, Unreachable

if TYPE_CHECKING:
    from controller.sandbox import Endpoint

_MARKER = "down-by-hand"


def up(
    *,
    revive: bool,
    start_stopped: bool = False,
    realistic: bool | None = None,
    python: Path | None = None,
    engine: str | None = None,
) -> Endpoint:
    """The running sandbox, started if need be. One that was taken down by hand stays down unless `revive`, a
    container that was stopped by `pct stop` stays so unless `start_stopped`.

    Raises Unreachable, also when this machine cannot run it.
    """
    from controller import sandbox  # asyncssh and the server's code only where they are needed

    was_down = is_down_by_hand()
    if was_down and not revive:
        raise _taken_down()
    try:
        return sandbox.up(
            realistic=realistic,
            python=python,
            engine=engine,
            start_stopped=start_stopped or was_down,
            turn=_coming_up(revive=revive),
        )
    except sandbox.SandboxError as error:
        raise Unreachable(error.message, error.hint) from None


@contextmanager
def _coming_up(*, revive: bool) -> Iterator[None]:
    """Around a start. A `down` that this has waited for holds: else a watch would undo it."""
    if is_down_by_hand() and not revive:
        raise _taken_down()
    yield
    _marker().unlink(missing_ok=True)


@contextmanager
def _going_down() -> Iterator[None]:
    """Around a stop: the mark comes first, and stays unless the server outlives a stop that failed."""
    from controller import sandbox

    was_down = is_down_by_hand()
    _marker().touch()
    try:
        yield
    except BaseException:
        if not was_down and sandbox.is_up():
            _marker().unlink()
        raise


def _marker() -> Path:
    return folder() / _MARKER


def _taken_down() -> Unreachable:
    return Unreachable("the sandbox was taken down by hand", "invoke sandbox.up")


def is_down_by_hand() -> bool:
    """Whether a person took it down and nothing has brought it up since."""
    return _marker().exists()


def is_up() -> bool:
    """Whether its host runs, and a person wants it to."""
    from controller import sandbox

    return sandbox.is_up() and not is_down_by_hand()


def down(*, container: bool = False, keep_data: bool = True) -> bool:
    """Take it down and remember that a person wanted it; returns whether anything was up.

    Raises PctrunError.
    """
    from controller import sandbox

    try:
        return sandbox.down(container=container, keep_data=keep_data, turn=_going_down())
    except sandbox.SandboxError as error:
        raise PctrunError(error.message, error.hint) from None


def starts(vmid: int) -> bool:
    """Whether `sandbox.up` starts this container, on one engine or the other."""
    from controller.sandbox.container import STARTED

    return any(vmid in vmids for vmids in STARTED.values())


def pct_start(vmid: int) -> str:
    """What starts any of its containers."""
    return f"{folder() / 'bin' / 'pct'} start {vmid}"


def known_hosts(endpoint: Endpoint) -> Path:
    """A known_hosts file for OpenSSH's own client, which takes no fingerprint."""
    path = folder() / "known_hosts"
    path.write_text(f"{endpoint.known_hosts_line.strip()}\n", "ascii")
    return path


def folder() -> Path:
    """Where the sandbox lives."""
    from controller import sandbox

    return sandbox.sandbox_dir()
