"""Proof that a deployed payload imports under the run's interpreter: `python -m trainer.selfcheck`."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import sys

import trainer


def main() -> int:
    names = sorted(
        module.name for module in pkgutil.iter_modules(trainer.__path__) if module.name != "__main__"
    )
    for name in names:
        importlib.import_module(f"trainer.{name}")
    versions = [f"python {platform.python_version()}"]
    for package in ("torch", "transformers", "safetensors"):
        versions.append(f"{package} {importlib.import_module(package).__version__}")
    print(f"ok: {len(names)} modules; {', '.join(versions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
