"""`pctrun`, the tasks as a program of their own: an installed copy works wherever an inventory.yaml is."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from invoke.context import Context
from invoke.program import Program
from invoke.tasks import task

from controller.tasks import namespace


@task(
    positional=("folder",),
    auto_shortflags=False,
    help={
        "folder": "where (default: here)",
        "payload": "also copy the payload, to be edited: deploy then sends the copy",
        "json": "print one JSON document on stdout",
    },
)
def init(c: Context, folder: Any = None, payload: bool = False, json_: bool = False) -> None:
    """Make a project: inventory.yaml and what belongs to it."""
    from controller import cli

    cli.init(str(folder), payload, as_json=json_, dry=bool(c.config.run.dry))


def main() -> None:
    """The console command; `invoke` in a folder with tasks.py takes the same words, without `init`."""
    namespace.add_task(init)
    program = Program(
        version=metadata.version("pctrun"), namespace=namespace, name="pctrun", binary_names=["pctrun"]
    )
    program.run(["pctrun", *_with_folder(sys.argv[1:])])


def _with_folder(words: list[str]) -> list[str]:
    """`init` alone means here: Invoke takes a positional argument always or never."""
    for place, word in enumerate(words, start=1):
        follows = words[place : place + 1]
        if word == "init" and not {"-h", "--help"} & set(words) and (not follows or follows[0][0:1] == "-"):
            return [*words[:place], ".", *words[place:]]
    return words
