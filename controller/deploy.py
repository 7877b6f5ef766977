"""Put the payload into the container: ask what is missing, stream that, let the agent verify and switch."""

from __future__ import annotations

import time
from typing import Any

from controller import links, release, source, words
from controller.call import call
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step, planned_python


def plan(box: Box, *, allow_slow_kernels: bool = False) -> Plan:
    wanted = release.scan()
    shown = _args(box, wanted, planned_python(box), allow_slow_kernels, stream=False)
    del shown["source"]
    shown["manifest"] = words.plural(len(wanted.entries), "file")
    paths = [entry.path for entry in wanted.entries]
    return Plan(
        "deploy",
        (
            Step(f"ask which files of release {wanted.id} are missing", "deploy", shown),
            Step(
                "send them as one tar, verify each by hash, import-check, prove kernels (GPU), switch",
                "deploy",
                {**shown, "stream": True},
                stream_bytes=release.tar_bytes(wanted, paths),
                maybe=True,
            ),
        ),
    )


def run(box: Box, console: Console, *, allow_slow_kernels: bool = False) -> Outcome:
    """Deploy; one round trip when the container has the release already, else two."""
    began, before = time.monotonic(), links.round_trips(box)
    wanted = release.scan()
    if wanted.root != release.own_payload():
        console.note(f"payload: the project's copy in {wanted.root}")
    python = links.get(box, revive=True).endpoint.python
    sent = 0
    args = _args(box, wanted, python, allow_slow_kernels, stream=False)
    result = call(box, "deploy", args, on_note=console.agent_note)
    if result["outcome"] == "missing":
        paths = result["want"]
        sent = release.tar_bytes(wanted, paths)
        stream = console.sent(release.tar(wanted, paths), sent)
        result = call(box, "deploy", {**args, "stream": True}, stream=stream, on_note=console.agent_note)
    document = {
        "outcome": result["outcome"],
        "release": wanted.id,
        "previous": result.get("previous"),
        "files": len(wanted.entries),
        "bytes": wanted.bytes,
        "sent_bytes": sent,
        "kernels": result.get("kernels") or [],
        "round_trips": links.round_trips(box) - before,
        "seconds": round(time.monotonic() - began, 3),
    }
    return Outcome(document, _text(document))


def _args(
    box: Box, wanted: release.Release, python: str, allow_slow_kernels: bool, *, stream: bool
) -> dict[str, Any]:
    return {
        "recipe": box.recipe,
        "overrides": box.overrides,
        "allow_slow_kernels": allow_slow_kernels,
        "release": wanted.id,
        "manifest": wanted.manifest(),
        "python": python,
        "stream": stream,
        "source": source.of(wanted.root),
    }


def _text(document: dict[str, Any]) -> str:
    trips = words.plural(document["round_trips"], "round trip")
    if document["outcome"] == "unchanged":
        return f"unchanged {document['release']} ({trips}, {document['seconds']:.1f} s)"
    text = (
        f"{document['outcome']} {document['release']} {words.plural(document['files'], 'file')} "
        f"{words.size(document['bytes'])} in {trips} ({document['seconds']:.1f} s)"
    )
    if document["previous"] and document["previous"] != document["release"]:
        text += f", was {document['previous']}"
    return "\n".join([text, *(f"  {line}" for line in document["kernels"])])
