"""All that made one run what it was, and what came of it, on one screen."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import Any

from controller import attempts, history, runs, source, words
from controller.console import Console, screen_width
from controller.inventory import Box
from controller.outcome import Outcome
from controller.plan import Plan, Step

Json = dict[str, Any]

_MAIN = ("python", "torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d")


def plan(box: Box, *, run_id: str = "") -> Plan:
    args = history.args([run_id] if run_id else [], limit=1, detail=True)
    return Plan("runs.show", (Step(f"look at {run_id or 'the newest run'}, change nothing", "runs", args),))


def run(box: Box, console: Console, *, run_id: str = "") -> Outcome:
    found = history.look(box, [run_id] if run_id else [], limit=1, detail=True)
    history.tell(found, console)
    if not found.entries:
        return Outcome({"run": None}, "no run yet: invoke restart")
    [entry] = found.entries
    row = runs.document(entry, found)
    facts = {"record": entry.get("record"), "provenance": entry.get("provenance"), "exit": entry.get("exit")}
    facts |= {"pin": entry.get("pin"), "attempts": entry.get("attempts")}
    document = {**row, **facts, "evaluations": entry.get("evaluations") or []}
    return Outcome(document, "\n".join(_screen(box, document)), word=row["verdict"])


def _screen(box: Box, row: Json) -> Iterator[str]:
    record, place = row["record"] or {}, row["provenance"] or {}
    seen = f", seen {words.age(time.time() - row['seen_at'])} ago" if row["seen_at"] else ""
    yield f"{box.label}  {row['id']}  {row['verdict'].upper()}  {row['summary']}{seen}"
    for reason in row["reasons"]:
        yield from _wrapped("why", reason)
    over = row["verdict"] in ("finished", "stopped", "crashed")
    took = f", {words.duration(row['seconds'])} {'in all' if over else 'so far'}" if row["seconds"] else ""
    by = runs.operator(row["operator"])
    yield _line("started", f"{runs.clock(row['created'])} UTC by {by}{took}")
    if row["pin"]:
        why = f": {row['pin']['reason']}" if row["pin"].get("reason") else ""
        yield _line("pinned", f"by {runs.operator(row['pin'].get('operator'))}{why}")
    begin = row["resume_from"]
    if not record:
        yield _line("record", "its run.json cannot be read: recipe, release, what it resumed are not known")
    else:
        yield _line("resumed", f"from {begin['run']} step {begin['step']}" if begin else "no, from scratch")
    for number, crash in enumerate((row["attempts"] or {}).get("crashes") or []):
        yield from _wrapped("" if number else "crashes", attempts.line(crash))
    if record:
        yield _line("recipe", f"{row['recipe']}  (configuration {row['config_hash'] or '?'})")
    for name, value in (record.get("overrides") or {}).items():
        yield _line("", f"{name} = {value}")
    if record:
        yield _line("release", f"{row['release']}, commit {source.text(row['source'])}")
    versions = record.get("versions") or {}
    known = [f"{name} {versions[name]}" for name in _MAIN if versions.get(name)]
    yield _line("versions", ", ".join(known) or "not recorded")
    packages = place.get("packages") or {}
    env = place.get("env")
    built = f" ({env['name']} {env['id'][:8]} of env.list)" if env else ""
    yield _line("packages", f"{len(packages)}, environment {place.get('environment') or '?'}{built}")
    yield _line("gpus", gpus(place.get("gpus") or {}))
    machine = place.get("machine") or {}
    if machine:
        memory = words.size(machine.get("memory_bytes") or 0)
        yield _line(
            "machine",
            f"{machine.get('hostname')}, {machine.get('cpus')} cores, {memory}, {machine.get('kernel')}",
        )
    cache = record.get("cache") or {}
    yield _line("cache", f"{cache.get('choice', '?')} ({cache.get('key', '?')})")
    if record.get("secrets"):
        yield _line("secrets", f"{', '.join(record['secrets'])} (only their names are kept)")
    if record.get("notify"):
        yield _line("notify", f"of {', '.join(record['notify'].get('when') or [])}, from beside the run")
    yield _line("step", f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"]))
    if row["tokens_per_s"] is not None:
        pace = f"{words.rate(row['tokens_per_s'])}, {words.duration(row['step_s'] or 0)} a step"
        yield _line("speed", f"{pace}, {'at its end' if over else 'lately'}")
    if row["loss"] is not None:
        yield _line("loss", _loss(row))
    if row["best_tau"] is not None:
        yield _line("τ", f"{row['tau']:.3f} last, {row['best_tau']:.3f} best at step {row['best_step']}")
    steps = ", ".join(map(str, row["checkpoints"]))
    saved = f"checkpoint{'s' * (',' in steps)} at step {steps}" if steps else "no checkpoint"
    yield _line("saved", f"{saved}{'; export' if row['export'] else ''}")
    yield from _values(place.get("recipe"))


def _loss(row: Json) -> str:
    """The mean that compares runs, and the last step's, which `status` shows."""
    last = f"{row['last_loss']:.4f} at its last step"
    if row["loss_steps"] == 1:
        return last
    return f"{row['loss']:.4f}, mean of its last {row['loss_steps']} steps; {last}"


def _values(tree: Any) -> Iterator[str]:
    """Every value of the recipe, a section a line."""
    if not isinstance(tree, dict):
        return
    sections = {"": {key: value for key, value in tree.items() if not isinstance(value, dict)}}
    sections |= {f"{key}: ": value for key, value in tree.items() if isinstance(value, dict)}
    name = "values"
    for section, values in sections.items():
        shown = ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
        for part in textwrap.wrap(f"{section}{shown}", screen_width() - 13):
            yield _line(name, part)
            name = ""


def gpus(facts: Json) -> str:
    names = facts.get("names") or {}
    if not names:
        return "none"
    listed = ", ".join(f"{count} x {name.removeprefix('NVIDIA ')}" for name, count in names.items())
    return f"{listed}, driver {facts.get('driver') or '?'}"


def _wrapped(name: str, text: str) -> Iterator[str]:
    for number, part in enumerate(textwrap.wrap(text, screen_width() - 13)):
        yield _line("" if number else name, part)


def _line(name: str, text: str) -> str:
    return f"  {name:<10} {text}"
