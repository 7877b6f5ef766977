"""Stop what runs, choose the cache, start at the last checkpoint; back when the trainer has spoken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from controller import attempts, links, mirror, secrets, stopping, words
from controller.call import call
from controller.console import Console
from controller.errors import PctrunError, Usage
from controller.inventory import Box, is_plain
from controller.outcome import Outcome
from controller.plan import Plan, Step, planned_python

AUTO_RESTARTS, MOST_RESTARTS = 3, 100
FIRST_STATE_S = 180.0  # imports of torch on a cold disk take tens of seconds


def plan(box: Box, **options: Any) -> Plan:
    args = _args(box, planned_python(box), **options)
    cache = "a fresh cache" if args["fresh_cache"] else "the cache as it is"
    what = f"{args['like']} again" if args["like"] else f"recipe {args['recipe']}"
    again = " and its own --auto-restart" if args["auto_restart"] is None else ""
    step = Step(f"stop what runs, then start {what} with {cache}{again}", "restart", args)
    return Plan("restart", (step,))


def run(box: Box, console: Console, **options: Any) -> Outcome:
    """Restart; raises RunDied with the trainer's last lines when it ends before its first state."""
    private = secrets.private(box)  # first: what is missing is said before anything is touched
    python = links.wake(box, console).endpoint.python
    try:
        args = _args(box, python, **options)
        result = call(box, "restart", args, on_note=console.agent_note, private=private)
    except PctrunError as error:
        if "stop" in error.details:  # the old run was stopped all the same: that must not go untold
            console.note(_stopped(error.details["stop"]))
        raise
    started = result["start"]
    record, source = started.pop("record", None), started.pop("provenance", None)
    mirror.keep(box, [{"id": started["run"], "record": record, "provenance": source}])
    text = _text(started, attempts.limit({"record": record}))
    return Outcome(result, "\n".join(filter(None, (_stopped(result["stop"]), text))))


def _args(
    box: Box,
    python: str,
    *,
    fresh_cache: bool = False,
    recipe: str = "",
    settings: Sequence[str] = (),
    from_scratch: bool = False,
    reason: str = "",
    release: str = "",
    from_run: str = "",
    allow_slow_kernels: bool = False,
    auto_restart: str | bool | None = None,
) -> dict[str, Any]:
    given = dict(parse_setting(text) for text in settings)
    return {
        **stopping.args(box, reason=reason),
        "recipe": recipe or (None if from_run else box.recipe),
        "overrides": given if from_run else {**box.overrides, **given},
        "release": release or None,
        "like": from_run or None,
        "python": python,
        "fresh_cache": fresh_cache,
        "allow_slow_kernels": allow_slow_kernels,
        "auto_restart": _restarts(box, auto_restart, from_run),
        "resume": "none" if from_scratch else "auto",
        "first_state_s": FIRST_STATE_S,
    }


def _restarts(box: Box, given: str | bool | None, from_run: str) -> int | None:
    """How often a crash is tried again: --auto-restart with or without a number, else as `from_run`'s (None),
    else the box's number."""
    if given is None or given is False:
        return None if from_run else box.auto_restart
    if given is True:
        return box.auto_restart or AUTO_RESTARTS
    if not given.isdecimal() or int(given) > MOST_RESTARTS:
        raise Usage(f"--auto-restart wants a number of 0 to {MOST_RESTARTS}, not '{given}'", "0 turns it off")
    return int(given)


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value`: `train.steps=20` and `train.lr=1e-3` are numbers, `a=[1, 2]` is a list, `a=x` a text.

    JSON first, because YAML 1.1 takes `1e-3` for a text; then YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise Usage(f"--set wants key=value, not '{text}'", "for example: --set train.steps=200")
    wrong = Usage(f"--set {key}: the value is not YAML: {value}", "quote it: --set 'key=\"text\"'")
    for parse in (json.loads, yaml.safe_load):
        try:
            parsed = parse(value) if value.strip() else ""
        except (ValueError, yaml.YAMLError, RecursionError):
            continue
        if is_plain(parsed):
            return key.strip(), parsed
        wrong = Usage(f"--set {key}: {value} is a {type(parsed).__name__}, which no recipe takes", wrong.hint)
    raise wrong


def _stopped(result: dict[str, Any]) -> str:
    return "" if stopping.did_nothing(result) else stopping.text(result)


def _text(result: dict[str, Any], restarts: int) -> str:
    source = result.get("resume_from")
    origin = f" from {source['run']} step {source['step']}" if source else " from scratch"
    cache = result.get("cache") or {}
    again = f"; a crash is tried again {words.plural(restarts, 'time')} at most" if restarts else ""
    after = result.get("first_state_after_s")
    spoke = f", first state after {words.duration(after)}" if after is not None else ""
    return f"started {result['run']}{origin}{spoke}, cache {cache.get('choice')} ({cache.get('key')}){again}"
