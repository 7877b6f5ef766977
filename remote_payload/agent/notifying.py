"""The supervisor, which outlives everything else of a run, starts its notifier and lets it finish."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import threading
import zlib
from typing import Any

from agent import interpreter, procs, secrets
from agent.call import Call, Json, Refusal
from agent.files import read_json

PROGRAM = "notifier.py"
LAST_S = 30.0  # for the last message: three tries to a peer that does not answer
_ENVIRONMENT = (procs.RUN_ID, procs.RUN_DIR, "PATH", "HOME", "LANG")
_ABOUT = """
import importlib.util, json, sys
found = importlib.util.find_spec("apprise") is not None
print(json.dumps({"python": list(sys.version_info[:2]), "apprise": found}))
"""


def check(call: Call, python: str) -> None:
    """Refuse a start whose messages could not leave: whoever asked to be told must not wait in vain."""
    wish = call.private.get("notify")
    if not wish:
        return
    able = interpreter.ask(python, _ABOUT)
    mend = "take notify: out of the box's entry, or leave it to `invoke watch --notify` (by: watch)"
    if able["python"] < wish["least_python"]:
        has, wants = (".".join(map(str, each)) for each in (able["python"], wish["least_python"]))
        raise Refusal(
            "environment", f"the notifier needs Python {wants}, the run's interpreter is {has}", mend
        )
    if wish["wants_apprise"] and not able["apprise"]:
        schemes = ", ".join(f"{each}://" for each in wish["wants_apprise"])
        raise Refusal(
            "environment",
            f"{schemes} needs apprise, which the run's interpreter does not have",
            f"add apprise to its environment, or {mend}",
        )


def record(call: Call) -> Json | None:
    """What `run.json` says of it; an address is a secret."""
    wish = call.private.get("notify")
    return {"when": wish["when"], "addresses": len(wish["urls"])} if wish else None


def place(run_dir: str, call: Call) -> None:
    """Put the program beside the run, which may outlive this agent."""
    wish = call.private.get("notify")
    if wish:
        with open(os.path.join(run_dir, PROGRAM), "xb") as file:
            file.write(zlib.decompress(base64.b64decode(wish["program"])))


def handover(call: Call) -> Json:
    """What the supervisor gets: all that is private, without the program, with the way to the run's files."""
    wish = call.private.get("notify")
    if not wish:
        return call.private
    told = {name: wish.get(name) for name in ("urls", "when", "box", "gpus", "vmid", "look_s")}
    told["hide"] = list(secrets.environment(call.private).values())
    return {**call.private, "notify": {**told, "roots": call.roots._asdict()}}


def begin(run_dir: str, facts: Json, private: Json | None) -> subprocess.Popen[bytes] | None:
    """Start it with the supervisor; a run whose notifier cannot start goes on, and `status` says so."""
    wish = (private or {}).get("notify")
    if not wish:
        return None
    program = os.path.join(run_dir, PROGRAM)
    try:
        child = subprocess.Popen(
            [facts["python"], "-I", program, procs.NOTIFIER, run_dir],
            cwd="/",
            env={name: facts["env"][name] for name in _ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    with contextlib.suppress(OSError):  # it may be dead already
        _stdin(child).write(json.dumps(wish).encode() + b"\n")
        _stdin(child).flush()
    threading.Thread(target=child.wait, daemon=True).start()  # one that dies early is no zombie
    return child


def finish(run_dir: str, child: subprocess.Popen[bytes] | None, private: Json | None) -> None:
    """After `exit.json` is written: give it time for the last message, none after a stop that is no news."""
    if child is None:
        return
    end = read_json(os.path.join(run_dir, "exit.json")) or {}
    news = end.get("reason") in ((private or {}).get("notify") or {}).get("when", ())
    with contextlib.suppress(OSError):
        _stdin(child).close()
    try:
        child.wait(LAST_S if news else 0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _stdin(child: subprocess.Popen[bytes]) -> Any:
    return child.stdin
