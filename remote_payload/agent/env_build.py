"""An environment is made from a lock beside the others, proven, then one link moves; a cut costs no download.

A build that is broken off leaves a folder without a record, which the next one makes anew from the wheels
that are here; the operator who comes back while it still goes on sees it to its end.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import time
import zipfile
from typing import Iterator

from agent import (
    environments,
    interpreter,
    lock,
    lockfile,
    longstep,
    releases,
    source_build,
    toolkit,
    wheelhouse,
)
from agent.call import Args, Call, Json, Refusal
from agent.files import tail_lines, tree_bytes, write_json

ARGS: Args = {
    "name": (str, None, "what to call it, such as cu130"),
    "lock": (str, None, "the lock's text"),
    "base": (str, None, "interpreter that it is made of; without it this one"),
    "arch": (str, None, "architecture for CUDA sources, such as 9.0; without it that of the GPUs here"),
    "offline": (bool, False, "wheels from the wheelhouse only"),
    "offered": (list, None, "names of wheels that could be sent: say which are needed, change nothing"),
    "use": (bool, True, "make it the current one"),
}
_WORK = ".work-"
# What kind of interpreter it is, and where it keeps a pip that another one can be run with
_ABOUT = """
import glob, importlib.util as util, json, os, platform, sys
places = ["/usr/share/python-wheels"]
spec = util.find_spec("ensurepip")
if spec and spec.origin:
    places.insert(0, os.path.join(os.path.dirname(spec.origin), "_bundled"))
pips = [path for place in places for path in sorted(glob.glob(os.path.join(place, "pip-*.whl")))]
own = util.find_spec("pip")
pips = [os.path.dirname(own.origin)] if own and own.origin else pips[-1:]
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "machine": platform.machine(),
    "implementation": sys.implementation.name,
    "pip": pips[0] if pips else None,
}))
"""
# Which packages want what the environment has not. Its own packages are listed before pip's folder is seen.
_AGREE = """
import importlib.metadata as metadata, json, sys
each_one = list(metadata.distributions())
sys.path.append(sys.argv[1])
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
found = {canonicalize_name(each.metadata["Name"]): each for each in each_one}
wrong = []
for name, each in sorted(found.items()):
    for text in each.requires or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        other = found.get(canonicalize_name(wanted.name))
        if other is None or not wanted.specifier.contains(other.version, prereleases=True):
            there = "is not there" if other is None else "is " + other.version
            wrong.append(f"{name} {each.version} wants {wanted.name}{wanted.specifier}, which {there}")
print(json.dumps({"wrong": wrong}))
"""


def run(call: Call) -> Json:
    """The contract's `env-build`. With `offered` a look: `{outcome, id, send[]}`, `missing` or `whole`."""
    args, roots = call.args, call.roots
    if args["lock"] is None or args["name"] is None:
        raise Refusal("usage", "env-build needs a lock and a name", "invoke env.build --name cu130")
    name, wanted = environments.check_name(args["name"]), lockfile.parse(args["lock"])
    base = interpreter.find_python(args["base"])
    facts = interpreter.ask(base, _ABOUT)
    _check_python(wanted, base, facts)
    if args["use"]:
        environments.refuse_hand_made(roots)
    arch = toolkit.architectures(roots, args["arch"]) if wanted.sources and _may_need_cuda(wanted) else None
    env = wanted.identity({"python": facts["python"], "machine": facts["machine"], "arch": arch})
    answer: Json = {"id": env, "name": name, "python": facts["python"], "previous": None}
    if args["offered"] is not None:
        if environments.record(roots, env) is None:
            send = wheelhouse.needed(roots, wanted, args["offered"], facts["python"], facts["machine"])
            return {**answer, "outcome": "missing", "send": send}
        return {**answer, "outcome": "whole", "send": []}
    with _turn(call) as handle:
        made = environments.record(roots, env)
        outcome = "unchanged" if made is not None else "built"
        if made is None:
            if args["offline"]:
                wheelhouse.needed(roots, wanted, [], facts["python"], facts["machine"])
            made = _make(call, env, wanted, base, facts, arch, handle)
        elif made.get("name") != name:
            made = {**made, "name": name}
            write_json(os.path.join(environments.folder(roots, env), environments.RECORD), made)
        answer["previous"] = environments.linked(roots, "current")
        if args["use"] and answer["previous"] != env:
            _use(call, env, name)
            outcome = "built" if outcome == "built" else "switched"
    return {
        **answer,
        "outcome": outcome,
        "current": environments.linked(roots, "current") == env,
        "record": made,
    }


def _use(call: Call, env: str, name: str) -> None:
    """`use`; when that cannot be, the environment is there all the same, and the refusal says so."""
    try:
        use(call, env)
    except Refusal as refusal:
        refusal.hint = f"{refusal.hint}; {name} itself is whole: invoke env.use {name}".lstrip("; ")
        raise


def use(call: Call, env: str) -> None:
    """Make a whole environment the current one, if the current release can be imported in it."""
    python = environments.python_of(environments.folder(call.roots, env))
    release = releases.linked(call.roots, "current")
    if release is not None:
        call.frames.note(f"checking that {python} can import release {release}")
        interpreter.import_check(python, releases.folder(call.roots, release))
    with lock.hold(call):
        environments.switch(call.roots, env)


@contextlib.contextmanager
def _turn(call: Call) -> Iterator[int]:
    """Hold the environments' lock, following whoever builds already: it may be our own call that was cut."""
    log = _log(call)
    told = 0.0

    def follow(holder: Json) -> None:
        nonlocal told
        if call.frames.gone():
            raise Refusal("locked", "nobody waits any more for the build that goes on")
        if not told:
            who = holder.get("operator") or {}
            call.frames.note(
                f"{who.get('user')}@{who.get('host')} is building (pid {holder.get('pid')}): following"
            )
        if time.monotonic() - told > 1:
            told = time.monotonic()
            call.frames.note(f"still building: {' '.join(tail_lines(log, 1))[:120]}", passing=True)

    with lock.hold(call, environments.LOCK, waiting=follow) as handle:
        yield handle


def _make(
    call: Call, env: str, wanted: lockfile.Lock, base: str, facts: Json, arch: str | None, handle: int
) -> Json:
    roots, offline = call.roots, call.args["offline"]
    path, work = environments.folder(roots, env), os.path.join(environments.root(roots), _WORK + call.nonce)
    _remove_debris(call, path)
    os.makedirs(work)
    log = _log(call)
    open(log, "wb").close()
    began = time.monotonic()
    try:
        _make_folder(base, path)
        python = environments.python_of(path)
        pip_code = _find_pip(call, facts, base, work)
        index = ["--no-index"] if offline else list(wanted.options)
        house = wheelhouse.place(roots)
        os.makedirs(house, exist_ok=True)
        index += ["--find-links", house]

        def pip(what: str, argv: list[str], more: dict[str, str]) -> str:
            quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
            clean = {"PATH": f"{os.path.dirname(python)}:{os.environ.get('PATH', '')}", "TMPDIR": work}
            if offline:
                clean["PIP_CONFIG_FILE"] = os.devnull  # no index or folder of the container's pip.conf
            env_ = {**os.environ, **clean, "PYTHONUNBUFFERED": "1", "VIRTUAL_ENV": path, **more}
            full = [python, pip_code, argv[0], *quiet, *argv[1:]]
            return longstep.run(call, what, full, log=log, lock=handle, env=env_, cwd=work)

        wheels = os.path.join(work, "wheels.txt")
        with open(wheels, "w", encoding="utf-8") as file:
            file.writelines(pin.line + "\n" for pin in wanted.wheels())
        if wanted.wheels():
            what = f"installing {len(wanted.wheels())} packages"
            pip(what, ["install", "--no-deps", "--only-binary", ":all:", *index, "-r", wheels], {})
        [packages] = glob.glob(os.path.join(glob.escape(path), "lib", "python3.*", "site-packages"))
        place = source_build.Place(path, work, packages, facts, interpreter.about(python), arch, offline)
        built = [source_build.build(roots, place, pin, index, pip) for pin in wanted.built()]
        _check_agreement(python, pip_code)
        return _record(call, env, path, python, built, time.monotonic() - began)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # nothing in it could be gone on with: wheels lie elsewhere
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_folder(base: str, path: str) -> None:
    made = interpreter.run_python(base, ["-m", "venv", "--without-pip", path], "/", 120)
    if made.returncode != 0:
        said = (made.stderr + made.stdout).strip().splitlines()
        words = said[-1] if said else "it said nothing"
        mend = "apt-get install -y python3-venv, or name another interpreter: --base"
        raise Refusal("no-python", f"{base} cannot make a virtual environment: {words}", mend)


def _find_pip(call: Call, facts: Json, base: str, work: str) -> str:
    """Folder of a pip that the new interpreter can run: one that was sent, else the base interpreter's own.

    It is not installed: whoever adds a package by hand makes an environment that no lock describes.
    """
    found = wheelhouse.pip_wheel(call.roots) or facts["pip"]
    if found is None:
        mend = "apt-get install -y python3-venv, or put a wheel of pip into the wheelhouse"
        raise Refusal("no-python", f"{base} has no pip to install wheels with", mend)
    if not found.endswith(".whl"):
        # Alone in a folder: pip takes what lies beside it for installed.
        os.makedirs(os.path.join(work, "pip"))
        os.symlink(found, os.path.join(work, "pip", "pip"))
        return os.path.join(work, "pip", "pip")
    with zipfile.ZipFile(found) as wheel:  # from the archive every call would compile all of it
        wheel.extractall(os.path.join(work, "pip"))
    return os.path.join(work, "pip", "pip")


def _check_agreement(python: str, pip_code: str) -> None:
    """Refuses a lock whose packages want others than it pins, as `pip check` does, two seconds sooner."""
    wrong = interpreter.ask(python, _AGREE, os.path.dirname(pip_code))["wrong"]
    if wrong:
        words = f"the packages of this lock do not agree: {wrong[0]}"
        raise Refusal("environment", words, "change the lock", log=wrong)


def _record(call: Call, env: str, path: str, python: str, built: list[Json], seconds: float) -> Json:
    about = interpreter.about(python)
    made: Json = {
        "schema": 1,
        "id": env,
        "name": call.args["name"],
        "created": time.time(),
        "operator": call.operator,
        "python": about["versions"]["python"],
        "base": interpreter.find_python(call.args["base"]),
        "cuda": about["torch"]["cuda"],
        "lock": call.args["lock"],
        "packages": interpreter.packages(python),
        "built": built,
        "bytes": tree_bytes(path)[0],
        "seconds": round(seconds, 1),
    }
    os.sync()  # thousands of files: after a power cut the record must not stand for empty ones
    write_json(os.path.join(path, environments.RECORD), made)
    return made


def _remove_debris(call: Call, path: str) -> None:
    """What a broken build left. We hold the lock, so nobody is at work in it."""
    root = environments.root(call.roots)
    os.makedirs(root, exist_ok=True)
    for name in os.listdir(root):
        if name.startswith((_WORK, ".current-", ".previous-")):
            left = os.path.join(root, name)
            if os.path.islink(left):
                os.unlink(left)
            else:
                shutil.rmtree(left, ignore_errors=True)
    if os.path.isdir(path):
        call.frames.note(
            f"a build of {os.path.basename(path)} was broken off: it is made anew from the wheels here"
        )
        shutil.rmtree(path)


def _check_python(wanted: lockfile.Lock, base: str, facts: Json) -> None:
    if wanted.python is not None and wanted.python != facts["python"]:
        raise Refusal(
            "environment",
            f"this lock is for Python {wanted.python}, {base} is {facts['python']}",
            f"--base /usr/bin/python{wanted.python}, or another lock",
        )


def _may_need_cuda(wanted: lockfile.Lock) -> bool:
    """Whether torch with CUDA is among the packages: without it no source is compiled for a GPU."""
    torch = next((pin for pin in wanted.pins if pin.name == "torch"), None)
    return torch is not None and "+cpu" not in torch.version


def _log(call: Call) -> str:
    return os.path.join(environments.root(call.roots), "build.log")
