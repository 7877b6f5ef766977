"""A person in the container can run any verb by hand: `python3 -m agent snapshot '{"log_lines": 5}'`."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
from typing import Any

from agent.call import DEFAULT_ROOTS, Refusal
from agent.frames import Frames
from agent.main import VERBS, answer, load


class PlainFrames(Frames):
    """The same frames for a person: notes and errors on stderr, output and the answer's JSON on stdout."""

    def _send(self, kind: str, data: bytes) -> None:
        if kind == "note":
            print(json.loads(data)["text"], file=sys.stderr, flush=True)
        elif kind == "end":
            envelope = json.loads(data)
            print(json.dumps(envelope.get("result", envelope.get("error")), indent=2), flush=True)
        else:
            stream = sys.stderr.buffer if kind == "err" else sys.stdout.buffer
            stream.write(data)
            stream.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m agent",
        description="What pctrun does inside the container, by hand. The answer is JSON on stdout.",
        epilog=_arguments(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=list(VERBS))
    parser.add_argument("args", nargs="?", default="{}", help="the verb's arguments as a JSON object")
    parser.add_argument(
        "--roots", default="", metavar="NAME=DIR,…", help="other folders: opt, lib, cache, run"
    )
    given = parser.parse_args()
    try:
        args = json.loads(given.args)
    except ValueError as error:
        parser.error(f"the arguments are not JSON ({error})")
    request: dict[str, Any] = {
        "schema": 1,
        "nonce": os.urandom(8).hex(),
        "verb": given.verb,
        "args": args,
        "roots": dict(part.partition("=")[::2] for part in given.roots.split(",") if part),
        "operator": {"user": getpass.getuser(), "host": os.uname().nodename},
    }
    return answer(request, PlainFrames(1, request["nonce"]), sys.stdin.buffer)


def _arguments() -> str:
    """Every verb with what it takes, from the verbs' own tables."""
    defaults = ", ".join(f"{name}={path}" for name, path in DEFAULT_ROOTS.items())
    lines = [f"roots: {defaults}"]
    for verb in VERBS:
        try:
            module = load(verb)
        except (Refusal, ImportError) as error:
            lines += ["", f"{verb}: cannot be loaded ({error})"]
            continue
        lines += ["", f"{verb}:"]
        lines += [
            f"  {name:<18}{text} (default {default!r})" for name, (_, default, text) in module.ARGS.items()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
