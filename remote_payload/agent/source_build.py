"""A package without a wheel for this torch and GPU is built once, and its wheel is kept for the next time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from typing import Callable, NamedTuple

from agent import toolkit, wheelhouse
from agent.call import Json, Refusal, Roots
from agent.files import read_json, write_json
from agent.lockfile import Pin
from agent.unpack import digest

JOB_BYTES = 4 << 30  # memory that one nvcc of a large template takes
MADE = "made.json"

# pip(what, arguments, more environment): runs the new environment's pip as a step that is shown
Pip = Callable[[str, "list[str]", "dict[str, str]"], str]


class Place(NamedTuple):
    """Where an environment is being made: `facts` are `{python, machine}`, `about` is interpreter.about's."""

    path: str
    work: str
    packages: str  # its site-packages
    facts: dict[str, str]
    about: Json
    arch: str | None
    offline: bool


def build(roots: Roots, place: Place, pin: Pin, index: list[str], pip: Pip) -> Json:
    """`{name, version, wheel, choice, seconds, nvcc, arch}`; choice is `kept` (from before) or `built`.

    Every wheel of the lock is installed by then: setup.py files import torch to know what to build against.
    """
    sdist = _source(roots, place, pin, index, pip)
    cuda = place.about["torch"]["cuda"] if toolkit.has_cuda_sources(sdist) else None
    tools = toolkit.find(cuda, place.packages, place.work) if cuda else None
    arch = place.arch if cuda else None
    parts = {
        "sdist": digest(sdist),
        "python": place.facts["python"],
        "machine": place.facts["machine"],
        "torch": place.about["versions"].get("torch"),
        "cuda": cuda,
        "arch": arch,
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    folder = os.path.join(wheelhouse.place(roots), "built", key)
    made = read_json(os.path.join(folder, MADE))
    choice = "kept" if made is not None else "built"
    if made is None:
        made = _compile(place, pin, sdist, tools, arch, folder, pip, parts)
    wheel = os.path.join(folder, str(made["wheel"]))
    pip(f"installing {pin.name} {pin.version}", ["install", "--no-deps", "--no-index", wheel], {})
    facts = {key: made.get(key) for key in ("wheel", "seconds", "nvcc", "arch")}
    return {"name": pin.name, "version": pin.version, "choice": choice, **facts}


def _source(roots: Roots, place: Place, pin: Pin, index: list[str], pip: Pip) -> str:
    """The sdist's path in the wheelhouse; from the index when it is not there."""
    machine, python = place.facts["machine"], place.facts["python"]
    found = wheelhouse.find(roots, pin, python, machine, source=True)
    if found is None and not place.offline:
        wanted = os.path.join(place.work, f"{pin.name}.txt")
        with open(wanted, "w", encoding="utf-8") as file:
            file.write(pin.line + "\n")
        argv = ["download", "--no-deps", "--no-build-isolation", "--no-binary", pin.name, *index]
        pip(f"downloading the source of {pin.name}", [*argv, "-d", wheelhouse.place(roots), "-r", wanted], {})
        found = wheelhouse.find(roots, pin, python, machine, source=True)
    if found is None:
        raise Refusal(
            "environment",
            f"there is no source of {pin.name} {pin.version} to build",
            f"put {pin.name}-{pin.version}.tar.gz into the wheelhouse",
        )
    return found


def _compile(
    place: Place,
    pin: Pin,
    sdist: str,
    tools: toolkit.Toolkit | None,
    arch: str | None,
    folder: str,
    pip: Pip,
    parts: Json,
) -> Json:
    _check_compiler()
    began = time.monotonic()
    more = _environment(place, pin, tools, arch)
    built = os.path.join(place.work, f"built-{pin.name}")
    nvcc = f" with nvcc {tools.release} for {arch}" if tools else ""
    argv = ["wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-index", "-w", built, sdist]
    pip(f"building {pin.name} {pin.version}{nvcc}", argv, more)
    [wheel] = os.listdir(built)
    made: Json = {
        "wheel": wheel,
        "seconds": round(time.monotonic() - began, 1),
        "nvcc": tools.release if tools else None,
        "arch": arch,
        "bytes": os.path.getsize(os.path.join(built, wheel)),
        "of": parts,
    }
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    shutil.move(os.path.join(built, wheel), folder)
    write_json(os.path.join(folder, MADE), made)  # last: without it the folder counts for nothing
    return made


def _environment(place: Place, pin: Pin, tools: toolkit.Toolkit | None, arch: str | None) -> dict[str, str]:
    more = {f"{pin.name.replace('-', '_').upper()}_FORCE_BUILD": "TRUE"}  # no wheel that was built elsewhere
    if tools is not None and arch is not None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        more["CUDA_HOME"] = toolkit.for_archs(tools, arch, os.path.join(place.work, pin.name)).home
        more["TORCH_CUDA_ARCH_LIST"] = arch
        more["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, memory // JOB_BYTES)))
    return more


def _check_compiler() -> None:
    """Refuses with the line that installs what is missing: pip's own words would be a page."""
    missing = [] if shutil.which("c++") or shutil.which("g++") else ["build-essential"]
    if missing:
        raise Refusal(
            "environment",
            "there is no C++ compiler in the container to build a source package with",
            f"apt-get install -y {' '.join(missing)}",
        )
