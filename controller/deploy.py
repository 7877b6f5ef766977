"""Put the payload into the container: stream what the agent says is missing, let it verify and switch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from queue import SimpleQueue
from typing import Any

from controller import links, release, source, words
from controller.call import call
from controller.console import Console
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step, planned_python


def plan(box: Box, *, allow_slow_kernels: bool = False) -> Plan:
    wanted = release.scan()
    shown = _args(box, wanted, planned_python(box), allow_slow_kernels)
    del shown["source"]
    shown["manifest"] = words.plural(len(wanted.entries), "file")
    paths = [entry.path for entry in wanted.entries]
    return Plan(
        "deploy",
        (
            Step(
                f"send the files of release {wanted.id} that are missing there as one tar, verify each by "
                "hash, import-check, prove kernels (GPU), switch",
                "deploy",
                shown,
                stream_bytes=release.tar_bytes(wanted, paths),
            ),
        ),
    )


def run(box: Box, console: Console, *, allow_slow_kernels: bool = False) -> Outcome:
    """Deploy in one round trip: the agent says on its way what it lacks, and takes that from its stdin."""
    began, before = time.monotonic(), links.round_trips(box)
    wanted = cache(release.scan)
    python = links.wake(box, console).endpoint.python
    asked: SimpleQueue[list[str]] = SimpleQueue()
    sent = 0

    def args() -> dict[str, Any]:
        if wanted().root != release.own_payload():
            console.note(f"payload: the project's copy in {wanted().root}")
        return _args(box, wanted(), python, allow_slow_kernels)

    def files() -> Iterator[bytes]:
        nonlocal sent
        if paths := asked.get():  # in the sender's thread
            sent = release.tar_bytes(wanted(), paths)
            yield from console.sent(release.tar(wanted(), paths), sent)

    try:
        result = call(
            box,
            "deploy",
            args,
            stream=files(),
            on_part=lambda part: asked.put(part["want"]),
            on_note=console.agent_note,
        )
    finally:
        asked.put([])  # nothing is lacking, or nobody listens any more
    document = {
        "outcome": result["outcome"],
        "release": wanted().id,
        "previous": result.get("previous"),
        "files": len(wanted().entries),
        "bytes": wanted().bytes,
        "sent_bytes": sent,
        "kernels": result.get("kernels") or [],
        "round_trips": links.round_trips(box) - before,
        "seconds": round(time.monotonic() - began, 3),
    }
    return Outcome(document, _text(document))


def _args(box: Box, wanted: release.Release, python: str, allow_slow_kernels: bool) -> dict[str, Any]:
    return {
        "recipe": box.recipe,
        "overrides": box.overrides,
        "allow_slow_kernels": allow_slow_kernels,
        "release": wanted.id,
        "manifest": wanted.manifest(),
        "python": python,
        "stream": True,
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
