"""Why: the agent travels on stdin, so its modules are imported from memory: nothing installed, nothing stale.

The controller sends one script: a line `SOURCES = {"agent": "...", "agent.main": "...", ...}`, then this
text. Only the modules that a verb imports are compiled; tracebacks show their lines through `get_source`.
(No `from __future__` here: this text stands after the SOURCES line.)
"""

import importlib.abc
import importlib.machinery
import sys
from types import CodeType, ModuleType
from typing import Optional


class MemoryImporter(importlib.abc.InspectLoader, importlib.abc.MetaPathFinder):
    """Imports the named sources; everything else stays with Python's own finders."""

    def __init__(self, sources: "dict[str, str]") -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: object = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name not in self.sources:
            return None
        package = self.is_package(name)
        spec = importlib.machinery.ModuleSpec(name, self, origin=self.filename(name), is_package=package)
        spec.has_location = True  # gives the module its __file__, which tracebacks print
        return spec

    def is_package(self, name: str) -> bool:
        return any(other.startswith(name + ".") for other in self.sources)

    def filename(self, name: str) -> str:
        return "pctrun:" + name.replace(".", "/") + ("/__init__.py" if self.is_package(name) else ".py")

    def get_source(self, name: str) -> str:
        return self.sources[name]

    def get_code(self, name: str) -> CodeType:
        return compile(self.sources[name], self.filename(name), "exec", dont_inherit=True)


if "SOURCES" in globals():
    sys.meta_path.insert(0, MemoryImporter(globals()["SOURCES"]))
    import agent.main

    agent.main.serve(sys.stdin.buffer)
