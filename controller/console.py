"""Notes and progress go to stderr, data to stdout, and two boxes never write into each other's line."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from controller import words
from controller.errors import Declined, Usage

_lock = threading.Lock()
_REDRAW_S, _PLAIN_S = 0.2, 10.0


def open_closed_streams() -> None:
    """`>&-`: a closed stream reads nothing and takes everything.

    Left closed, its number would pass to the next file that is opened: `exec --stdin` would read our socket.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest free number: 0, 1 or 2
            setattr(sys, name, os.fdopen(handle, mode, encoding="utf-8"))


class Console:
    """Where an operation says what it does meanwhile. `prefix` names the box when there are several."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = f"{prefix}: " if prefix else ""
        self._drawn = False
        self._shown_at = time.monotonic() - _REDRAW_S  # the first line of a terminal comes at once

    def note(self, text: str) -> None:
        """One line that stays."""
        if text:
            self._write(f"{self._wipe()}{self.prefix}{text}\n")

    def agent_note(self, document: dict[str, Any]) -> None:
        """A `note` frame; a passing one makes room for the next."""
        text = str(document.get("text") or "")
        if document.get("passing"):
            self.progress(text)
        else:
            self.note(text)

    def progress(self, text: str, *, plain: bool = True) -> None:
        """One line that the next replaces; without a terminal one every ten seconds, none if not `plain`."""
        now = time.monotonic()
        terminal = sys.stderr.isatty() and not self.prefix
        if now - self._shown_at < (_REDRAW_S if terminal else _PLAIN_S):
            return
        self._shown_at = now
        if terminal:
            self._write(f"\r\x1b[K{words.cut(text, _columns(sys.stderr) - 1)}")
            self._drawn = True
        elif plain:
            self._write(f"{self.prefix}{text}\n")

    def sent(self, pieces: Iterable[bytes], total: int) -> Iterator[bytes]:
        """The same pieces, and how far they have got."""
        count = 0
        for piece in pieces:
            yield piece
            count += len(piece)
            self.progress(f"sent {words.size(count)} of {words.size(total)}")
        self.clear()

    def confirm(self, question: str, kept: str) -> None:
        """Come back when a person at a terminal says yes; `kept` is so without: "nothing was removed".

        Raises Declined for any other answer, Ctrl-C and Ctrl-D too, Usage where nobody can be asked.
        """
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise Usage(f"{kept}: nobody is here to answer '{question}'", "--yes answers it")
        self._write(f"{self._wipe()}{self.prefix}{question} [y/N] ")
        try:
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            answer = ""
        if not answer.endswith("\n"):
            self._write("\n")  # the cursor still stands behind the question
        if answer.strip().lower() not in ("y", "yes"):
            raise Declined(kept)

    def clear(self) -> None:
        """Take the progress line away."""
        self._write(self._wipe())

    def _wipe(self) -> str:
        wiped, self._drawn = ("\r\x1b[K" if self._drawn else ""), False
        return wiped

    def _write(self, text: str) -> None:
        if text:
            with _lock:
                sys.stderr.write(text)
                sys.stderr.flush()


def screen_width() -> int:
    """Of a screen on stdout: what its terminal has, from 60 to 100; 100 where there is none."""
    return max(60, _columns(sys.stdout))


def table_width() -> int | None:
    """Of a table on stdout: what its terminal has, 60 at least; None, any width, where there is none."""
    columns = _terminal(sys.stdout)
    return max(60, columns) if columns else None


def _columns(stream: TextIO) -> int:
    """The terminal's width, at most 100: a line that wraps tears words and could not be wiped."""
    return min(100, _terminal(stream) or 100)


def _terminal(stream: TextIO) -> int:
    """The terminal's width; 0 where there is none, or it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
