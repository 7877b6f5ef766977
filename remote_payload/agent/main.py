"""One place turns a request into a verb and its outcome into one `end` frame, whatever happens."""

from __future__ import annotations

import errno
import importlib
import json
import os
from types import ModuleType
from typing import IO, Any

from agent import environments
from agent.call import Call, Refusal, check_args, parse_roots
from agent.frames import Frames, ReaderGone

VERBS = {
    "snapshot": "agent.snapshot",
    "deploy": "agent.deploy",
    "start": "agent.start",
    "stop": "agent.stop",
    "restart": "agent.restart",
    "read": "agent.read",
    "exec": "agent.execute",
    "doctor": "agent.doctor",
    "fetch": "agent.fetch",
    "runs": "agent.history",
    "prune": "agent.prune",
    "pin": "agent.pin",
    "rollback": "agent.rollback",
    "watch": "agent.watch",
    "unlock": "agent.unlock",
    "wheels": "agent.wheelhouse",
    "env-build": "agent.env_build",
    "env-list": "agent.env_list",
    "env-use": "agent.env_use",
    "env-prune": "agent.env_prune",
}


def serve(stdin: IO[bytes]) -> None:
    """Answer the request on stdin with frames on stdout, then leave at once.

    `os._exit`: a thread may still block in a read of stdin, and the interpreter's end would wait for it.
    """
    try:
        request = json.loads(stdin.readline())
        nonce = request["nonce"]
        if not (
            isinstance(nonce, str) and nonce.isalnum() and nonce.isascii()
        ):  # it becomes part of file names
            raise ValueError(f"nonce {nonce!r:.40}")
    except (ValueError, KeyError, TypeError) as error:
        os.write(2, f"pctrun agent: the request is not a JSON line with a nonce ({error})\n".encode())
        os._exit(1)
    frames = Frames(1, nonce)
    try:
        if frames.gone():
            raise BrokenPipeError
        os.write(1, b"\n")  # the first word: the container answers, however long the work takes
    except BrokenPipeError:  # nobody waits for this order any more, as after the container was suspended
        os._exit(1)
    os._exit(answer(request, frames, stdin))


def answer(request: Any, frames: Frames, stdin: IO[bytes]) -> int:
    """Run the request's verb; 0 when it succeeded, else 1. One `end` frame is written in every case."""
    verb = str(request.get("verb"))
    try:
        if request.get("schema") != 1:
            raise Refusal("usage", f"this agent speaks schema 1, not {request.get('schema')!r}")
        module = load(verb)
        args, roots = (
            check_args(verb, module.ARGS, request.get("args") or {}),
            parse_roots(request.get("roots") or {}),
        )
        if "python" in args:  # it may name an environment, and must not go through a link that may move
            args["python"] = environments.resolve(roots, args["python"])
        call = Call(
            verb=verb,
            nonce=request["nonce"],
            args=args,
            roots=roots,
            operator=request.get("operator") or {},
            frames=frames,
            stdin=stdin,
            private=request.get("private") or {},
        )
        frames.end(verb, module.run(call))
        return 0
    except Refusal as refusal:
        frames.fail(
            verb, {"kind": refusal.kind, "message": refusal.message, "hint": refusal.hint, **refusal.more}
        )
    except ReaderGone:
        pass
    except OSError as error:
        frames.fail(verb, _system_error(error))
    except Exception as error:
        frames.fail(verb, _internal(error))
    return 1


def load(verb: str) -> ModuleType:
    if verb not in VERBS:
        raise Refusal("usage", f"there is no verb {verb!r}", f"the verbs are {', '.join(VERBS)}")
    return importlib.import_module(VERBS[verb])


def _system_error(error: OSError) -> dict[str, Any]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        if error.errno == errno.ENOSPC and error.filename and _out_of_inodes(str(error.filename)):
            hint = "remove small files there, many of them"
            return {"kind": "disk", "message": f"no inode left on the disk{where}", "hint": hint}
        return {"kind": "disk", "message": f"no space left on the disk{where}", "hint": "free some space"}
    if error.errno == errno.EROFS:
        hint = "a disk with errors becomes so: dmesg | tail, on the host"
        return {"kind": "disk", "message": f"the file system of {error.filename} is read-only", "hint": hint}
    return _internal(error)


def _out_of_inodes(path: str) -> bool:
    """Whether it is files, and not bytes, for which the file system has no room."""
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    try:
        room = os.statvfs(path)
    except OSError:
        return False
    return room.f_files > 0 and room.f_favail == 0  # 0 of 0: they are not counted (btrfs)


def _internal(error: Exception) -> dict[str, Any]:
    """A defect of ours on one line: what was raised, and the innermost line of the agent that was running."""
    import traceback

    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "agent/" in frame.filename]
    where = "".join(f"{at.filename}:{at.lineno} in {at.name}: {at.line}" for at in ours[-1:])
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return {"kind": "internal", "message": f"{message} ({where})", "hint": "this is a defect of the agent"}
