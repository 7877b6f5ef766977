"""A box with a wheelhouse, and the few things that tests of environments do with one."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from tests.agent import tiny_packages as tiny
from tests.agent.conftest import make_box, remove_box


@contextlib.contextmanager
def stocked():
    """The box; what is built in it already costs nothing, so tests share one."""
    made = make_box()
    wheels = [tiny.wheel("alpha", f"{number}.0") for number in range(1, 5)]
    send(made, *wheels, tiny.wheel("needy", "1.0", requires="alpha>=9"), tiny.wheel("omega", "1.0"))
    try:
        yield made
    finally:
        remove_box(made)


def send(box, *files):
    """Put files into the box's wheelhouse, as the controller does."""
    content = dict(files)
    manifest = box.manifest_of(content)
    want = box.call("wheels", files=manifest).result["want"]
    stream = box.tar_of({each["path"]: content[each["path"]][each["from"] :] for each in want})
    return box.call("wheels", files=manifest, stream=True, stream_bytes=stream).result


def build(box, lock, name="tiny", **args):
    return box.call("env-build", name=name, lock=lock, base=box.python, offline=True, **args)


def venv(box, env):
    return Path(box.roots["opt"]) / "venv" / env


def says(box, env, program):
    done = subprocess.run(
        [venv(box, env) / "bin/python", "-I", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def current(box):
    link = venv(box, "current")
    return link.readlink().name if link.is_symlink() else None
