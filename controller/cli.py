"""From options to output and exit code: the one place where errors become text and numbers."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

from invoke.exceptions import Exit

from controller import errors, inventory, many, plan, project, render, typed
from controller.console import Console, open_closed_streams, screen_width
from controller.errors import ConnectionLost, Detached, PctrunError, Usage
from controller.inventory import Box, Inventory
from controller.outcome import Outcome

SCHEMA = 1

# What goes on without us after Ctrl-C or a lost connection: a stop or a start is never cut in half by them.
_GOES_ON = {
    "deploy": "a deploy goes on only if it had arrived whole; `current` switches whole or not at all",
    "restart": "the restart goes on; `invoke status` shows how far it got",
    "abort": "the stop goes on; `invoke status` shows when it is done",
    "exec": "the agent ends the command",
    "env.build": "the build goes on; `invoke env.build` with the same options follows it",
    "fetch": "what has arrived stays, and the same command goes on from there",
}


def operate(
    task: str,
    *,
    boxes: Sequence[str],
    every: bool,
    as_json: bool,
    dry: bool,
    module: str = "",
    one_at_a_time: bool = False,
    lone: bool = False,
    whole: Mapping[str, str] | None = None,
    seconds: Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    """Run `controller.<module>` on each box, print, and raise invoke's Exit with the worst code.

    The module has the task's name, `.` as `_`, unless it is named. `dry` prints the operation's plan
    instead. `one_at_a_time` is for tasks that stream or take the terminal, `lone` for those without end.
    `whole` and `seconds` are options that are numbers, as they were typed.
    """

    def work() -> int:
        typed.check(sys.argv)
        options.update({name: _number(int, name, text) for name, text in (whole or {}).items()})
        options.update({name: _number(float, name, text) for name, text in (seconds or {}).items()})
        chosen = _inventory().pick(boxes, every=every)
        if (lone or options.get("follow")) and len(chosen) > 1:
            what = task if lone else "--follow"
            raise Usage(f"{what} takes one box", "use a terminal of its own for each")
        for box in () if dry else chosen:
            Thread(target=_dial_ahead, args=(box,), daemon=True).start()
        operation = importlib.import_module(f"controller.{(module or task).replace('.', '_')}")

        def act(box: Box, console: Console) -> Outcome:
            if dry:
                made = operation.plan(box, **options)
                return Outcome(plan.as_json(made), plan.text(made, box, width=screen_width()))
            try:
                result: Outcome = operation.run(box, console, **options)
            except ConnectionLost as error:
                if task in _GOES_ON:
                    unsure = "it may have arrived: then " if task in ("restart", "abort") else ""
                    error.hint = unsure + _GOES_ON[task]
                raise
            return result

        results = many.over(chosen, act, parallel=not one_at_a_time)
        return _report(task, chosen, results, several=every or len(chosen) > 1, as_json=as_json)

    _finish(work, task, as_json=as_json)


def _inventory() -> Inventory:
    """The boxes; a copy that is installed from its checkout says when it takes the checkout's."""
    path = inventory.find()
    if project.is_borrowed(path):
        Console().note(f"inventory: {path} (the checkout's: none here or above)")
    return inventory.load(path)


def _dial_ahead(box: Box) -> None:
    """The way to a host takes several round trips and a login: time in which the operation is imported and
    the payload hashed. In a thread, because the import of the transport is itself a part of that."""
    from controller import links

    links.dial_ahead(box)


def _number(kind: type[int] | type[float], name: str, text: str) -> float:
    """`text` as a number of 0 or more; `name` is the parameter's, which for seconds ends in `_s`."""
    try:
        value = kind(text)
        if 0 <= value < float("inf"):
            return value
    except ValueError:
        pass
    wanted = "a whole number of 0 or more" if kind is int else "a number of seconds, 0 or more"
    given = f", not '{text}'" if text else ""
    raise Usage(f"--{name.removesuffix('_s')} wants {wanted}{given}")


def boxes(names: list[str], *, as_json: bool) -> None:
    """`invoke boxes`."""
    from controller.boxes import table

    _single("boxes", lambda: table(_inventory(), names), as_json=as_json)


def sandbox(name: str, would: str, *, as_json: bool, dry: bool, **options: Any) -> None:
    """`invoke sandbox.<name>`: a function of sandbox_tasks; with `dry` only say what it `would` do."""
    task = f"sandbox.{name}"
    if dry:
        planned = Outcome({"plan": [would]}, f"{task} would {would}; nothing was done")
        _single(task, lambda: planned, as_json=as_json)
        return
    operation = getattr(importlib.import_module("controller.sandbox_tasks"), name)
    _single(task, lambda: operation(Console(), **options), as_json=as_json)


def init(folder: str, payload: bool, *, as_json: bool, dry: bool) -> None:
    """`pctrun init`."""
    from controller import init as making

    def act() -> Outcome:
        if dry:
            would = f"make a project in {folder}"
            return Outcome({"plan": [would]}, f"init would {would}; nothing was done")
        return making.run(Console(), Path(folder), payload=payload)

    _single("init", act, as_json=as_json)


def _single(task: str, act: Callable[[], Outcome], *, as_json: bool) -> None:
    def work() -> int:
        outcome = act()
        if as_json:
            head = {"schema": SCHEMA, "task": task, "exit_code": outcome.exit_code}
            print(json.dumps({**head, **outcome.document}, indent=2))
        elif outcome.text:
            print(outcome.text)
        return outcome.exit_code

    _finish(work, task, as_json=as_json)


def _report(
    task: str,
    boxes: Sequence[Box],
    results: Iterable[tuple[Box, many.Result]],
    *,
    several: bool,
    as_json: bool,
) -> int:
    """`several`: each box answers as one among others, also where --all has found one."""
    codes, documents = [], []
    short = apart = False
    width = max(len(box.label) for box in boxes)
    for box, result in results:
        codes.append(result.exit_code)
        head = {"box": box.name, "vmid": box.vmid, "exit_code": result.exit_code}
        if isinstance(result, PctrunError):
            documents.append({**head, "error": errors.as_json(result)})
            if not as_json:
                label = f"{box.name}: " if several else ""
                print(f"{label}{errors.describe(result)}", file=sys.stderr)
            continue
        documents.append({**head, **result.document})
        if as_json or not result.text:
            continue
        shown = many.text(box, result, width) if several else result.text
        block = "\n" in shown and not shown.rpartition("\n")[2].startswith(box.label)
        with _reader_may_leave():  # the boxes after this one are seen through all the same
            if apart or (len(documents) > 1 and block):
                print()
            print(render.paint(shown, result.word), flush=True)
        short, apart = short or bool(result.line), block
    code = errors.worst(codes) if len(codes) > 1 else codes[0]
    with _reader_may_leave():
        if short and several:
            print(f"next  invoke {task} --box NAME shows the whole")
        if as_json:
            whole = {"schema": SCHEMA, "task": task, "exit_code": code, "boxes": documents}
            print(json.dumps(whole, indent=2))
    return code


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Whoever read our output may have had enough (`| head -1`): no complaint, and the exit code stands."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def _discard_stdout() -> None:
    """What is still buffered goes nowhere: the interpreter's last flush must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finish(work: Callable[[], int], task: str, *, as_json: bool) -> None:
    """Run `work`; every expected failure ends here. Success lets the next task on the line run."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets a ? for τ, not a traceback
    code = 0
    try:
        with _reader_may_leave():
            code = work()
    except PctrunError as error:
        _fail(error, task, as_json=as_json)
    except KeyboardInterrupt:
        still = _GOES_ON.get(task, "a run in the container goes on")
        _fail(Detached(f"interrupted, only this side stopped: {still}"), task, as_json=as_json)
    except OSError as error:  # of this machine: our stdout on a full disk, a payload file that cannot be read
        _discard_stdout()
        what = error.filename or "cannot write the output"
        _fail(PctrunError(f"{what}: {error.strerror or error}"), task, as_json=False)
    if code:
        raise Exit(code=code)


def _fail(error: PctrunError, task: str, *, as_json: bool) -> NoReturn:
    if as_json:
        document = {
            "schema": SCHEMA,
            "task": task,
            "exit_code": error.exit_code,
            "error": errors.as_json(error),
        }
        print(json.dumps(document, indent=2))
        raise Exit(code=error.exit_code) from None
    raise Exit(errors.describe(error), code=error.exit_code) from None
