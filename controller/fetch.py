"""Bring a trained drafter here: streamed, continued at the byte where it broke off, verified, then placed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from controller import words
from controller.call import call
from controller.console import Console
from controller.errors import FINAL, Unreachable
from controller.incoming import Damaged, Incoming
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

OUT = "drafters"  # where nothing is named: a folder that git leaves alone
RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)


def plan(box: Box, *, run_id: str = "", checkpoint: str = "", out: str = OUT) -> Plan:
    named = {"": "the export, else the last checkpoint,", "export": "the export"}
    what = named.get(checkpoint, f"checkpoint {checkpoint}")
    text = f"stream {what} of {run_id or 'the newest run'} into {out}, verify it, then put it in place"
    return Plan("fetch", (Step(text, "fetch", _args(run_id, checkpoint)),))


def run(box: Box, console: Console, *, run_id: str = "", checkpoint: str = "", out: str = OUT) -> Outcome:
    """Fetch into `out`/RUN-NAME. A connection that broke is made anew as long as that brings more bytes.

    Raises Usage when something else lies in that place, Damaged when a file does not verify twice.
    """
    began = time.monotonic()
    unseen = out == OUT
    incoming = Incoming(Path(out).expanduser(), box, lambda text: console.progress(text), unseen=unseen)
    result = _received(box, console, incoming, _args(run_id, checkpoint))
    console.clear()
    files = [{key: file[key] for key in ("path", "bytes", "sha256")} for file in result["files"]]
    document = {
        "run": result["run"],
        "step": result["step"],
        "tau": result["tau"],
        "path": str(incoming.final),
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
        "sent_bytes": incoming.received,
        "seconds": round(time.monotonic() - began, 3),
    }
    return Outcome(document, _text(document))


def _received(box: Box, console: Console, incoming: Incoming, args: dict[str, Any]) -> dict[str, Any]:
    failures, damaged = 0, False
    while True:
        before = incoming.received
        try:
            now = {**args, "have": incoming.have()}
            result = call(
                box,
                "fetch",
                now,
                on_note=console.agent_note,
                on_part=incoming.announced,
                on_out=incoming.take,
            )
            incoming.settle(result)
            return result
        except Unreachable as error:
            failures = 0 if incoming.received > before else failures + 1
            if not incoming.received or failures >= len(RETRY_S) or isinstance(error, FINAL):
                raise
            pause = RETRY_S[failures]
            console.note(f"{error.message}; going on in {pause:g} s where it broke off")
            time.sleep(pause)
        except Damaged as error:
            if damaged:
                raise
            damaged = True
            console.note(f"{error.message}; it is fetched once more")
        finally:
            incoming.close()


def _args(run_id: str, checkpoint: str) -> dict[str, Any]:
    return {"run": run_id or None, "what": checkpoint or "auto", "have": {}}


def _text(document: dict[str, Any]) -> str:
    tau = f", τ {document['tau']:.2f}" if document["tau"] is not None else ""
    step = f" step {document['step']}{tau}" if document["step"] is not None else ""
    size = f"{words.plural(len(document['files']), 'file')} {words.size(document['bytes'])}"
    if not document["sent_bytes"]:
        return f"unchanged {document['path']}: {document['run']}{step}, {size}, verified"
    if document["sent_bytes"] < document["bytes"]:
        size += f" ({words.size(document['sent_bytes'])} of it now)"
    took = f"{document['seconds']:.1f} s"
    return f"fetched {document['path']}: {document['run']}{step}, {size} in {took}, verified"
