"""The agent travels with each request: nothing is installed in a container, nothing there goes stale.

Only what the verb needs travels: the modules that it imports, and those that they import. The whole agent is
240 KiB of text; the part that a status needs deflates to 27 KiB, 22 ms on a line of 10 Mbit/s.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import cache

from controller import project
from controller.errors import PctrunError
from controller.release import own_payload

# `from agent import a, b` (also over several lines) and `from agent.a import x`: the agent has no other form.
_IMPORT = re.compile(r"^ *from agent(?:\.(\w+) import| import (\([^)]*\)|[^\n]*))", re.MULTILINE)
_VERB = re.compile(r'^ +"([\w.-]+)": "(agent\.\w+)",$', re.MULTILINE)  # a line of VERBS in agent/main.py


@cache
def sources() -> dict[str, str]:
    """Every module of the agent by its name, as text."""
    folder = own_payload() / "agent"  # never a project's copy: this side speaks its language
    found = {
        "agent" if path.stem == "__init__" else f"agent.{path.stem}": path.read_text("utf-8")
        for path in sorted(folder.glob("*.py"))
    }
    if "agent.boot" not in found:
        mend = "git status" if project.is_checkout() else "pip install --force-reinstall pctrun"
        raise PctrunError(f"no agent in {folder}: this copy of pctrun is not whole", mend)
    return found


@cache
def script(verb: str) -> bytes:
    """One Python program: the modules that `verb` needs as text, then `agent/boot.py` that imports them."""
    modules = needed(["agent.main", *_module_of(verb)])
    return f"SOURCES = {modules!a}\n{sources()['agent.boot']}".encode()


def needed(names: Iterable[str]) -> dict[str, str]:
    """The texts of these modules of the agent and of all that they import, by name."""
    every = sources()
    found, waiting = {"agent"}, list(names)
    while waiting:
        name = waiting.pop()
        if name not in found and name in every:
            found.add(name)
            waiting += _imports(every[name])
    return {name: every[name] for name in sorted(found)}


@cache
def preamble(verb: str) -> bytes:
    """What the one-line loader in the argument list reads first: a length, then the program, deflated."""
    program = zlib.compress(script(verb), 6)  # 9 takes 10 ms more for 0.4 %
    return b"%d\n%s" % (len(program), program)


def _module_of(verb: str) -> list[str]:
    """None for an unknown verb: the agent itself says which there are."""
    return [module for name, module in _VERB.findall(sources()["agent.main"]) if name == verb]


def _imports(text: str) -> list[str]:
    found = []
    for module, names in _IMPORT.findall(text):
        listed = [module] if module else re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names))
        found += [f"agent.{name}" for name in listed]
    return found
