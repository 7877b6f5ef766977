"""An ad-hoc look into the container with any argument list, which arrives exactly as it was given."""

from __future__ import annotations

import os
import select
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from controller.call import Bytes, call
from controller.console import Console
from controller.errors import Usage
from controller.inventory import Box
from controller.logs import write_stdout
from controller.outcome import Outcome
from controller.plan import Plan, Step


@dataclass(frozen=True)
class ExecResult:
    """`code` as a shell gives it (128 + number for a signal), `signal` a name or None.

    The outputs are bytes, empty when they went to callbacks.
    """

    code: int
    signal: str | None
    stdout: bytes = b""
    stderr: bytes = b""


def execute(
    box: Box,
    argv: Sequence[str],
    stdin: bytes | Iterable[bytes] | None = None,
    *,
    cwd: str | None = None,
    timeout_s: float | None = None,
    on_out: Bytes | None = None,
    on_err: Bytes | None = None,
) -> ExecResult:
    """Run `argv` in the container. It travels as JSON, so no shell and no locale touches an argument."""
    out: list[bytes] = []
    err: list[bytes] = []
    stream = [stdin] if isinstance(stdin, bytes) else stdin
    result = call(
        box,
        "exec",
        _args(argv, stdin is not None, cwd, timeout_s),
        stream=stream,
        on_out=on_out or out.append,
        on_err=on_err or err.append,
    )
    return ExecResult(int(result["code"]), result.get("signal"), b"".join(out), b"".join(err))


def words_of(command: str, more: Sequence[str]) -> list[str]:
    """The argument list of `invoke exec`: `command` split as a shell would, then `more` as they are."""
    try:
        return [*shlex.split(command), *more]
    except ValueError as error:
        raise Usage(
            f"cannot split '{command}': {error}", "close the quote, or give exact arguments with --arg"
        ) from None


def plan(
    box: Box,
    *,
    command: str,
    more: Sequence[str] = (),
    with_stdin: bool = False,
    cwd: str = "",
    timeout_s: float = 0.0,
    capture: bool = False,
) -> Plan:
    args = _args(words_of(command, more), with_stdin, cwd or None, timeout_s or None)
    return Plan("exec", (Step("run one command in the container", "exec", args),))


def run(
    box: Box,
    console: Console,
    *,
    command: str,
    more: Sequence[str] = (),
    with_stdin: bool = False,
    cwd: str = "",
    timeout_s: float = 0.0,
    capture: bool = False,
) -> Outcome:
    """Stream the outputs to ours, or `capture` them as text; the remote exit code becomes ours."""
    result = execute(
        box,
        words_of(command, more),
        _our_stdin() if with_stdin else None,
        cwd=cwd or None,
        timeout_s=timeout_s or None,
        on_out=None if capture else write_stdout,
        on_err=None if capture else _write_stderr,
    )
    document: dict[str, Any] = {"code": result.code, "signal": result.signal}
    if capture:
        document["stdout"] = result.stdout.decode("utf-8", "replace")
        document["stderr"] = result.stderr.decode("utf-8", "replace")
    return Outcome(document, exit_code=result.code)


def _args(argv: Sequence[str], with_stdin: bool, cwd: str | None, timeout_s: float | None) -> dict[str, Any]:
    if not argv:
        raise Usage("nothing to run", "invoke exec 'nvidia-smi -L'")
    if any("\0" in word for word in argv):
        raise Usage("an argument holds a NUL byte, which no program can be given")
    return {"argv": list(argv), "cwd": cwd, "stdin": with_stdin, "timeout_s": timeout_s}


def _our_stdin() -> Iterator[bytes]:
    """Unbuffered: a reader that is still blocked here must not hold a lock when this process ends."""
    handle = sys.stdin.fileno()
    while True:
        select.select([handle], [], [])  # it may be non-blocking: another program may have set it so
        piece = os.read(handle, 64 * 1024)
        if not piece:
            return
        yield piece


def _write_stderr(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()
