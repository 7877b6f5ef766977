"""The agent travels on stdin, so its modules are imported from memory: nothing installed, nothing stale.

The controller sends one script: a line `SOURCES = {"agent": "...", "agent.main": "...", ...}`, then this
text. Only the modules that a verb imports are compiled; tracebacks show their lines through `get_source`.
(No `from __future__` here: this text stands after the SOURCES line.)
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Optional


class MemoryImporter:
    """Finder and loader of the named sources; everything else stays with Python's own finders.

    Without the base classes of `importlib.abc`, whose import alone costs a fifth of a snapshot.
    """

    def __init__(self, sources: "dict[str, str]") -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: object = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name not in self.sources:
            return None
        package = self.is_package(name)
        spec = ModuleSpec(name, self, origin=self.filename(name), is_package=package)  # type: ignore[arg-type]
        spec.has_location = True  # gives the module its __file__, which tracebacks print
        return spec

    def is_package(self, name: str) -> bool:
        return any(other.startswith(name + ".") for other in self.sources)

    def filename(self, name: str) -> str:
        return "pctrun:" + name.replace(".", "/") + ("/__init__.py" if self.is_package(name) else ".py")

    def get_source(self, name: str) -> str:
        return self.sources[name]

    def create_module(self, spec: ModuleSpec) -> None:
        """None: Python makes the module itself."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        code = compile(self.sources[name], self.filename(name), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - what an importer does


if "SOURCES" in globals():
    sys.meta_path.insert(0, MemoryImporter(globals()["SOURCES"]))
    import agent.main

    agent.main.serve(sys.stdin.buffer)
