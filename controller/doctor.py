"""From the workstation to the GPU in two round trips: what is right, what is not, and what to do about it.

One shell call asks the host, one agent call the container; a part that cannot be asked is said to be skipped,
and the others are asked all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from controller import (
    checklist,
    checks,
    checks_container,
    checks_gpu,
    checks_host,
    checks_secrets,
    hostlook,
    links,
    release,
)
from controller.call import call
from controller.checks import Check, Json
from controller.console import Console, screen_width
from controller.deadline import Deadline
from controller.endpoint import Endpoint
from controller.errors import PctrunError, Unreachable
from controller.inventory import Box, Roots
from controller.outcome import Outcome
from controller.plan import Plan, Step, planned_python

PROOF_S = 300.0  # a cold cache: compiling and tuning take a minute or two
_CONTAINER = Deadline(total=PROOF_S + 60.0)


@dataclass
class Findings:
    """What was seen; None where nobody could be asked, with the reason beside it. `way`: no connection."""

    endpoint: Endpoint | None
    connect_s: float
    way: PctrunError | None = None
    host: Json | None = None
    host_error: PctrunError | None = None
    container: Json | None = None
    container_error: PctrunError | None = None
    round_trips: int = 0


def plan(box: Box, *, quick: bool = False) -> Plan:
    host = "ask the host: its pct, the container's state, its clock, its kernel's log of the GPUs"
    container = Step(
        "ask the container: all that a run needs", "doctor", _args(box, planned_python(box), quick)
    )
    return Plan("doctor", (Step(host), container))


def run(box: Box, console: Console, *, quick: bool = False) -> Outcome:
    """All checks. The exit code is that of the worst failed one (7: the way, 5: the container is off, 9: what
    a run needs), 2 for warnings alone, else 0."""
    findings = look(box, console, quick=quick)
    made = [
        *judge(findings, gpus=box.gpus, ours=release.scan().id, roots=box.roots),
        *checks_secrets.here(box),
    ]
    document: dict[str, Any] = {
        "checks": [check.as_json() for check in made],
        "counts": checks.counts(made),
        "round_trips": findings.round_trips,
        "host": findings.host,
        "container": findings.container,
    }
    word = checklist.word(made)
    text = checklist.screen(box.label, made, alive(findings), width=screen_width())
    return Outcome(document, text, checks.exit_code(made), word, line=text.partition("\n")[0])


def look(box: Box, console: Console, *, quick: bool) -> Findings:
    """Ask the host and the container at once."""
    began = time.monotonic()
    try:
        link = links.get(box)
    except Unreachable as error:
        return Findings(None, time.monotonic() - began, way=error)
    found = Findings(link.endpoint, link.connect_s, round_trips=2)

    def ask_host() -> None:
        try:
            found.host = hostlook.look(link).as_json()
        except PctrunError as error:
            found.host_error = error

    # Side by side: each costs the host 0.6 s of CPU, and it has more than one core.
    asking = threading.Thread(target=ask_host, daemon=True)
    asking.start()
    try:
        args = _args(box, link.endpoint.python, quick)
        found.container = call(box, "doctor", args, on_note=console.agent_note, deadline=_CONTAINER)
    except PctrunError as error:
        found.container_error = error
    asking.join()
    return found


def alive(found: Findings) -> list[str]:
    """The runs that live in the container, as far as it could be asked."""
    return [str(run["id"]) for run in (found.container or {}).get("alive") or []]


def _args(box: Box, python: str, quick: bool) -> dict[str, Any]:
    return {
        "recipe": box.recipe,
        "overrides": box.overrides,
        "python": python,
        "prove": not quick,
        "prove_s": PROOF_S,
    }


def judge(found: Findings, *, gpus: int | None, ours: str, roots: Roots) -> list[Check]:
    """Every check, in the order of the way: a pure function. `ours` is the release of the payload here."""
    made = list(checks_host.way(found.endpoint, found.connect_s, found.way))
    if found.endpoint is None:
        why = "there is no way to the host"
        return [*made, *checks.skipped(checks_host.HOST, checks_host.HOST_CHECKS, why), *_unasked(why)]
    if found.host is not None:
        made += checks_host.host(found.host, found.endpoint)
    else:
        why = found.host_error.message if found.host_error else "it was not asked"
        made += checks.skipped(checks_host.HOST, checks_host.HOST_CHECKS, f"the host gave no answer: {why}")
    facts = found.container
    if facts is None:
        return [*made, *_no_answer(found, made)]
    made += checks_container.container(facts, found.host, found.endpoint, roots)
    made += checks_container.payload(facts, ours)
    made += checks_gpu.gpus(facts, found.host, found.endpoint, gpus)
    made += checks_gpu.code(facts)
    return made


def _no_answer(found: Findings, made: list[Check]) -> Iterator[Check]:
    """The agent could not be asked; where the host has said why already, it is not said twice."""
    error = found.container_error
    known = any(check.group == checks_host.HOST and check.state == checks.FAILED for check in made)
    why = "the container cannot be asked"
    if error is None or known:
        yield from _unasked(why)
        return
    mend = error.hint or "try again; docs/messages.md has the exit codes"
    agent, *rest = _unasked(why)
    yield checks.failed(agent.group, agent.name, error.message, mend, code=error.exit_code)
    yield from rest


def _unasked(why: str) -> Iterator[Check]:
    yield from checks.skipped(checks_container.CONTAINER, checks_container.CONTAINER_CHECKS, why)
    yield from checks.skipped(checks_container.PAYLOAD, checks_container.PAYLOAD_CHECKS, why)
    yield from checks.skipped(checks_gpu.GPU, checks_gpu.GPU_CHECKS, why)
    yield from checks.skipped(checks_gpu.CODE, checks_gpu.CODE_CHECKS, why)
