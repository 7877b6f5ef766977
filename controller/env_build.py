"""Make an environment in the container from a lock: built beside the others, proven, then switched to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controller import links, release, wheelhouse, words
from controller.call import call
from controller.console import Console
from controller.errors import Usage
from controller.inventory import CURRENT_ENVIRONMENT, Box
from controller.outcome import Outcome
from controller.plan import Plan, Step, planned_python

Json = dict[str, Any]


def plan(
    box: Box,
    *,
    env: str = "",
    lock: str = "",
    wheels: str = "",
    source: Sequence[str] = (),
    base: str = "",
    arch: str = "",
    aside: bool = False,
) -> Plan:
    args = _args(env, lock, source, base, arch, aside)
    shown = {**args, "lock": f"{len(args['lock'].splitlines())} lines"}
    then = "" if aside else ", make it current"
    build = Step(f"build it beside the others, prove it{then}", "env-build", shown)
    if not wheels:
        return Plan("env.build", (build,))
    look = {**shown, "offered": [f"names in {wheels}"]}
    sending = {"files": "those that are wanted, with their hashes", "stream": False}
    return Plan(
        "env.build",
        (
            Step("ask which wheels it needs, change nothing", "env-build", look),
            Step("ask which of them are missing there", "wheels", sending, maybe=True),
            Step("send those", "wheels", {**sending, "stream": True}, maybe=True),
            Step(build.text, "env-build", {**shown, "offline": True}),
        ),
    )


def run(
    box: Box,
    console: Console,
    *,
    env: str = "",
    lock: str = "",
    wheels: str = "",
    source: Sequence[str] = (),
    base: str = "",
    arch: str = "",
    aside: bool = False,
) -> Outcome:
    """One call, which ends at once when the environment is there; with `wheels` up to four.

    A build that was cut off goes on in the container: the same command again follows it to its end.
    """
    began = time.monotonic()
    args = _args(env, lock, source, base, arch, aside)
    sent = 0
    links.wake(box, console)
    if wheels:
        folder = Path(wheels).expanduser()
        offered = wheelhouse.names(folder)
        seen = call(box, "env-build", {**args, "offered": offered}, on_note=console.agent_note)
        if seen["send"]:
            sent = wheelhouse.send(box, folder, seen["send"], console)
        args["offline"] = True
    result = call(box, "env-build", args, on_note=console.agent_note)
    console.clear()
    record = result["record"]
    document = {
        "outcome": result["outcome"],
        "id": result["id"],
        "name": result["name"],
        "current": result["current"],
        "previous": result["previous"],
        "python": record["python"],
        "packages": record["packages"],
        "built": record["built"],
        "bytes": record["bytes"],
        "sent_bytes": sent,
        "seconds": round(time.monotonic() - began, 3),
    }
    return Outcome(document, "\n".join(_text(box, document)))


def _args(env: str, lock: str, source: Sequence[str], base: str, arch: str, aside: bool) -> Json:
    path = Path(lock).expanduser() if lock else _locks().get(env)
    if path is None:
        known = ", ".join(_locks())
        what = f"there is no lock named '{env}'" if env else "say which environment"
        raise Usage(what, f"--name with one of {known}, or --lock FILE")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Usage(f"{path} cannot be read: {error}", "--lock names a requirements file") from None
    return {
        "name": env or path.stem,
        "lock": text + "".join(_from_source(each) for each in source),
        "base": base or None,
        "arch": arch or None,
        "use": not aside,
    }


def _locks() -> dict[str, Path]:
    """The locks that come with the payload, by name."""
    return {path.stem: path for path in sorted((release.payload_root() / "locks").glob("*.txt"))}


def _from_source(pin: str) -> str:
    name, _, version = pin.partition("==")
    if not name or not version:
        raise Usage(f"--source wants NAME==VERSION, not '{pin}'", "--source causal-conv1d==1.7.0")
    return f"\n{name.strip()}=={version.strip()}\n--no-binary {name.strip()}\n"


def _text(box: Box, document: Json) -> list[str]:
    size, count = words.size(document["bytes"]), words.plural(len(document["packages"]), "package")
    took = words.duration(document["seconds"])
    line = f"{document['outcome']} {document['name']} {document['id'][:8]}  "
    line += f"Python {document['python']}, {count}, {size} ({took})"
    if not document["current"]:
        line += f"; not current: invoke env.use {document['name']}"
    elif document["outcome"] != "unchanged" and document["previous"]:
        line += f", was {document['previous'][:8]}"
    lines = [line]
    for each in document["built"]:
        nvcc = f", nvcc {each['nvcc']} for {each['arch']}" if each["nvcc"] else ""
        how = "from before" if each["choice"] == "kept" else f"in {words.duration(each['seconds'])}"
        lines.append(f"  {each['name']} {each['version']} built {how}{nvcc}")
    used = planned_python(box)
    if used != CURRENT_ENVIRONMENT:
        lines.append(
            f"  this box runs {used}: `python: {CURRENT_ENVIRONMENT}` in the inventory uses this one"
        )
    return lines
