"""How a missing package gets into the interpreter that runs: a mend that works where it is read.

An environment of `invoke env.build` holds no pip and is never changed: what it lacks belongs into its lock.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder


def install_line(package: str) -> str:
    """`package` as pip names it, perhaps with a version: `torch>=2.10`."""
    # not util.find_spec: setuptools' finder takes the question for an import of pip and replaces distutils
    if PathFinder.find_spec("pip"):
        quoted = f"'{package}'" if set("<>[") & set(package) else package
        return f"{sys.executable} -m pip install {quoted}"
    return f"add {package} to the lock of this environment, then invoke env.build --lock FILE"
