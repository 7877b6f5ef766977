"""An environment is a virtual environment that never changes once made: its name, its place, its record.

It is built where it will stay, because a virtual environment cannot be moved: what makes it whole is its
record, which is written last. A folder without one is half-built, and nobody's.
"""

from __future__ import annotations

import os
import re
from typing import Any, Iterable

from agent import procs, runs
from agent.call import Json, Refusal, Roots
from agent.files import number, read_json, remove_quietly

PREFIX = "env:"
RECORD = "environment.json"
LOCK = "environments.lock"  # held while one is built; the box's own lock stays free for stop and status
LINKS = ("current", "previous")
_ID = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def root(roots: Roots) -> str:
    return os.path.join(roots.opt, "venv")


def folder(roots: Roots, env: str) -> str:
    return os.path.join(root(roots), env)


def python_of(path: str) -> str:
    return os.path.join(path, "bin", "python")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in LINKS or _ID.fullmatch(name):
        raise Refusal("usage", f"{name!r:.80} cannot name an environment", "a short word such as cu130")
    return name


def record(roots: Roots, env: str) -> Json | None:
    return read_json(os.path.join(folder(roots, env), RECORD))


def whole(roots: Roots) -> list[Json]:
    """The records of all whole environments, newest first."""
    found = [record(roots, name) for name in _folders(roots)]
    known = [each for each in found if each is not None]
    return sorted(known, key=lambda each: number(each, "created") or 0.0, reverse=True)


def half_built(roots: Roots) -> list[str]:
    """Folders of builds that were cut off. While a build holds LOCK, one of them is its own."""
    return [name for name in _folders(roots) if record(roots, name) is None]


def _folders(roots: Roots) -> list[str]:
    try:
        entries = list(os.scandir(root(roots)))
    except OSError:
        return []
    return sorted(
        each.name for each in entries if _ID.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
    )


def linked(roots: Roots, link: str) -> str | None:
    """The environment that `current` or `previous` points at, when it is there and whole."""
    try:
        env = os.path.basename(os.readlink(os.path.join(root(roots), link)))
    except OSError:
        return None
    return env if _ID.fullmatch(env) and record(roots, env) is not None else None


def named(roots: Roots, text: str) -> Json:
    """The record that a link, a name (of several the newest) or an id's beginning means, or a refusal."""
    text = text[len(PREFIX) :] if text.startswith(PREFIX) else text
    everything = whole(roots)
    if text in LINKS:
        matches = [each for each in everything if each["id"] == linked(roots, text)]
    else:
        matches = [each for each in everything if each.get("name") == text][:1]
        matches = matches or [each for each in everything if text and str(each["id"]).startswith(text)]
    if len(matches) == 1:
        return matches[0]
    words = "several environments begin with" if matches else "there is no environment"
    shown = ", ".join(f"{each.get('name')} ({each['id'][:8]})" for each in everything)
    raise Refusal("usage", f"{words} {text!r:.80}", f"there are: {shown}" if shown else "invoke env.build")


def resolve(roots: Roots, python: str | None) -> str | None:
    """The interpreter's path for `env:NAME` or a path; never through `current`, which may move under a run.

    Refuses nothing: what is not there is for whoever starts the interpreter to say.
    """
    if python is None:
        return None
    if python.startswith(PREFIX):
        text = python[len(PREFIX) :]
        if text not in LINKS:
            try:
                text = named(roots, text)["id"]
            except Refusal:
                pass
        python = python_of(folder(roots, text))
    for link in LINKS:
        way = os.path.join(root(roots), link)
        if python.startswith(way + "/") and os.path.islink(way):
            return os.path.realpath(way) + python[len(way) :]
    return python


def of_python(python: str) -> Json | None:
    """`{id, name}` of the environment that an interpreter belongs to, or None."""
    found = read_json(os.path.join(os.path.dirname(os.path.dirname(python)), RECORD))
    return None if found is None else {"id": found.get("id"), "name": found.get("name")}


def refuse_hand_made(roots: Roots) -> None:
    """An interpreter that the operator put in the link's place is not ours to move."""
    way = os.path.join(root(roots), "current")
    if os.path.isdir(way) and (not os.path.islink(way) or linked(roots, "current") is None):
        mend = f"mv {way} {way}-by-hand, and name that one in `python:` to use it again"
        raise Refusal("environment", f"{way} was made by hand, not by env.build", mend)


def switch(roots: Roots, env: str) -> str | None:
    """Move `current`, keep where it was as `previous`, return that; the caller holds the box's lock."""
    refuse_hand_made(roots)
    before = linked(roots, "current")
    for link, target in (("previous", before), ("current", env)):
        if target is None or (link == "previous" and target == env):
            continue
        aside = os.path.join(root(roots), f".{link}-{os.getpid()}")
        remove_quietly(aside)
        os.symlink(target, aside)
        os.replace(aside, os.path.join(root(roots), link))
    return before


def users(roots: Roots) -> dict[str, str]:
    """Environments that may not go, and why: linked, of a live or pinned run, or open in some process."""
    kept: dict[str, str] = {}
    marked = procs.marked()
    for run_dir in (*runs.pinned(roots), *marked):
        python = str((read_json(os.path.join(run_dir, "run.json")) or {}).get("python"))
        env = _of_path(roots, python)
        if env is not None:
            how = "alive" if run_dir in marked else "pinned"
            kept[env] = f"{os.path.basename(run_dir)} is {how}"
    for env, pid in _open_in_processes(roots).items():
        kept.setdefault(env, f"process {pid} uses it")
    for link in LINKS:
        env = linked(roots, link)
        if env is not None:
            kept.setdefault(env, f"the {link} one")
    return kept


def _of_path(roots: Roots, path: str) -> str | None:
    below = root(roots) + "/"
    env = path[len(below) :].split("/")[0] if path.startswith(below) else ""
    return env if _ID.fullmatch(env) else None


def _open_in_processes(roots: Roots) -> dict[str, int]:
    """Whose files a process has mapped, or whose interpreter it was started with: a run of nobody's, too."""
    below = re.compile(re.escape(root(roots)).encode() + rb"/([0-9a-f]{16})/")
    found: dict[str, int] = {}
    for pid in procs.pids():
        if pid != os.getpid():
            for env in _ids(below.findall(procs.read_proc(pid, "maps") + procs.read_proc(pid, "cmdline"))):
                found.setdefault(env, pid)
    return found


def _ids(found: Iterable[Any]) -> set[str]:
    return {each.decode() for each in found}
