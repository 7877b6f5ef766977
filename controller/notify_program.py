"""The notifier beside a run judges as `status` does: the same texts travel to it, as one program.

Neither side imports the other. Texts are put together here: the agent's give the looks (agent.notifier), the
controller's pure modules the opinion.
"""

from __future__ import annotations

import re
import zlib
from base64 import b64encode
from functools import cache
from pathlib import Path

from controller import bundle

# `from controller import a, b` and `from controller.a import x`, at the beginning of a line
_IMPORT = re.compile(r"^from controller(?:\.(\w+) import| import ([^\n(]+))", re.MULTILINE)
_ROOTS = ("notify_rules", "notify_send")
LEAST_PYTHON = (3, 10)  # of the interpreter that runs it: the texts of the controller are written for that

_MAIN = """
sys.meta_path.insert(0, MemoryImporter(SOURCES))
from agent import notifier
from controller import notify_rules as rules, notify_send, verdict
sys.exit(notifier.main(notifier.Opinion(verdict.judge, rules.Changes, rules.message, notify_send)))
"""


@cache
def text() -> str:
    """A program for the run's own interpreter; `agent/notifier.py` says what it reads."""
    every = {**bundle.needed(["agent.notifier"]), **_opinion()}
    # its own way in, where boot.py has `agent.main`
    boot = bundle.sources()["agent.boot"].partition('if "SOURCES" in globals():')[0]
    return f"SOURCES = {dict(sorted(every.items()))!a}\n{boot}{_MAIN}"


@cache
def packed() -> str:
    """The same for a JSON request."""
    return b64encode(zlib.compress(text().encode(), 9)).decode()


def _opinion() -> dict[str, str]:
    """The modules of the controller that a verdict and a message need."""
    folder = Path(__file__).parent
    found = {"controller": ""}
    waiting = list(_ROOTS)
    while waiting:
        name = waiting.pop()
        if f"controller.{name}" not in found:
            found[f"controller.{name}"] = source = (folder / f"{name}.py").read_text("utf-8")
            for module, names in _IMPORT.findall(source):
                waiting += [module] if module else re.findall(r"\w+", re.sub(r" as \w+", "", names))
    return found
