"""One request to the agent, one answer: the only way in which anything reaches a container."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from controller import bundle, links, pct
from controller.deadline import DEFAULT, Deadline
from controller.errors import ProtocolError, Unreachable, from_agent
from controller.frames import Frame, FrameParser
from controller.inventory import Box

SCHEMA = 1
_KEPT_STDERR = 16 * 1024

Note = Callable[[dict[str, Any]], None]
Bytes = Callable[[bytes], None]


def call(
    box: Box,
    verb: str,
    args: dict[str, Any] | Callable[[], dict[str, Any]],
    *,
    stream: Iterable[bytes] | None = None,
    on_note: Note | None = None,
    on_part: Note | None = None,
    on_out: Bytes | None = None,
    on_err: Bytes | None = None,
    private: dict[str, Any] | None = None,
    deadline: Deadline = DEFAULT,
) -> dict[str, Any]:
    """The `result` of one verb. `stream` follows the request on stdin, frames go to the callbacks.

    `args` that take their time may be a function: it is called in the sender's thread while `pct` starts the
    agent, 0.6 s. `private` travels beside `args`, which plans and errors show: secrets.

    Raises the error of errors.py that the agent's error kind, `pct` or the connection stands for, and
    whatever `args`, `stream` or a callback raises.
    """
    answer = _Answer(os.urandom(8).hex(), on_note, on_part, on_out, on_err)

    def request() -> Iterator[bytes]:
        yield bundle.preamble(verb)
        document = {
            "schema": SCHEMA,
            "nonce": answer.nonce,
            "verb": verb,
            "args": args() if callable(args) else args,
            "roots": box.roots.as_dict(),
            "operator": {"user": getpass.getuser(), "host": socket.gethostname()},
        }
        if private:
            document["private"] = private
        yield json.dumps(document).encode("ascii") + b"\n"
        yield from stream or ()

    link = links.get(box, deadline=deadline)  # last: it may be on its way already
    links.count_round_trip(box)
    try:
        status = link.run(
            pct.command(link.endpoint),
            feed=request(),
            on_stdout=answer.stdout,
            on_stderr=answer.stderr,
            finished=lambda: answer.envelope is not None,
            deadline=deadline,
        )
    except Unreachable:
        if answer.envelope is None:
            links.drop(box)
            raise
        status = None
    if answer.envelope is None:
        raise pct.explain(link.endpoint, status, answer.said, answer.noise)
    if answer.envelope.get("ok"):
        return dict(answer.envelope.get("result") or {})
    raise from_agent(answer.envelope.get("error") or {})


class _Answer:
    """Collects what one call returns: frames to their callbacks, the envelope, and the noise around them."""

    def __init__(
        self,
        nonce: str,
        on_note: Note | None,
        on_part: Note | None,
        on_out: Bytes | None,
        on_err: Bytes | None,
    ) -> None:
        self.nonce = nonce
        self.envelope: dict[str, Any] | None = None
        self._parser = FrameParser(nonce)
        self._on_note, self._on_part, self._on_out, self._on_err = on_note, on_part, on_out, on_err
        self._stderr = b""

    def stdout(self, chunk: bytes) -> None:
        for frame in self._parser.feed(chunk):
            self._take(frame)

    def stderr(self, chunk: bytes) -> None:
        self._stderr = (self._stderr + chunk)[-_KEPT_STDERR:]

    @property
    def said(self) -> str:
        return self._stderr.decode("utf-8", "replace")

    @property
    def noise(self) -> str:
        return self._parser.skipped.decode("utf-8", "replace")

    def _take(self, frame: Frame) -> None:
        if frame.kind == "out":
            if self._on_out:
                self._on_out(frame.data)
        elif frame.kind == "err":
            if self._on_err:
                self._on_err(frame.data)
        elif frame.kind == "note":
            if self._on_note:
                self._on_note(_document(frame))
        elif frame.kind == "part":
            if self._on_part:
                self._on_part(_document(frame))
        elif frame.kind == "end":
            self.envelope = _document(frame)
        else:
            raise ProtocolError(f"the agent sent a frame of unknown kind '{frame.kind}'")


def _document(frame: Frame) -> dict[str, Any]:
    try:
        document = json.loads(frame.data)
    except ValueError as error:
        raise ProtocolError(f"the agent's {frame.kind} frame is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema", SCHEMA) != SCHEMA:
        raise ProtocolError(f"the agent's {frame.kind} frame is not of schema {SCHEMA}")
    return document
