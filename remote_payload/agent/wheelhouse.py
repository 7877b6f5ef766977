"""Wheels that came from the workstation, or were built here, stay: the next environment needs no network.

Files lie flat in `<lib>/wheelhouse/`, each whole: one that is on its way has another name and goes on at the
byte it has. What was built here lies in `built/<key>/`, because a wheel's name does not say which torch, CUDA
and GPU it was built for.
"""

from __future__ import annotations

import glob
import hashlib
import os
import tarfile
from typing import NamedTuple

from agent import tarstream, unpack
from agent.call import Args, Call, Json, Refusal, Roots
from agent.files import read_json, remove_quietly, size_words, write_json
from agent.lockfile import Lock, Pin, canonical

ARGS: Args = {
    "files": (list, None, "wheels and sdists: [{path, sha256, bytes, mode}]"),
    "stream": (bool, False, "a tar of the wanted files follows on stdin, each from the byte that is wanted"),
}
_KNOWN = ".hashes.json"
_SDIST = (".tar.gz", ".zip")


class Filename(NamedTuple):
    """What a distribution's file name says; `pythons` is empty for an sdist."""

    name: str
    version: str
    pythons: tuple[str, ...]
    abis: tuple[str, ...]
    platforms: tuple[str, ...]


def place(roots: Roots) -> str:
    return os.path.join(roots.lib, "wheelhouse")


def names(roots: Roots) -> list[str]:
    try:
        return sorted(each for each in os.listdir(place(roots)) if parse_name(each) is not None)
    except OSError:
        return []


def parse_name(file: str) -> Filename | None:
    """`torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl` or `causal_conv1d-1.7.0.tar.gz` in parts."""
    if file.startswith(".") or "/" in file:
        return None
    if file.endswith(".whl"):
        parts = file[:-4].replace("%2B", "+").split("-")
        if len(parts) not in (5, 6):
            return None
        tags = [tuple(each.split(".")) for each in parts[-3:]]
        return Filename(canonical(parts[0]), parts[1].lower(), tags[0], tags[1], tags[2])
    for ending in _SDIST:
        if file.endswith(ending):
            name, _, version = file[: -len(ending)].rpartition("-")
            return Filename(canonical(name), version.lower(), (), (), ()) if name else None
    return None


def fits(file: Filename, pin: Pin, python: str, machine: str, source: bool) -> bool:
    """Whether a file is what `pin` wants here. Pip has the last word: glibc is not looked at."""
    if (file.name, file.version) != (pin.name, pin.version.lower()) or bool(file.pythons) == source:
        return False
    if source:
        return True
    minor = int(python.split(".")[1])
    exact, stable = f"cp3{minor}", [f"cp3{each}" for each in range(2, minor + 1)]
    pure = [f"py3{each}" for each in range(minor + 1)]
    if not (
        {"py3", exact, *pure} & set(file.pythons) or ("abi3" in file.abis and set(stable) & set(file.pythons))
    ):
        return False
    return any(each == "any" or each.endswith(machine) for each in file.platforms)


def needed(roots: Roots, lock: Lock, offered: list[str], python: str, machine: str) -> list[str]:
    """Which of the files offered the lock wants here; refuses when one is neither offered nor here already.

    A wheel of pip is wanted, too, where there is one.
    """
    here = names(roots)
    send: list[str] = []
    missing: list[str] = []
    for pin in lock.pins:
        source = pin.name in lock.sources
        found = [each for each in offered if _is(each, pin, python, machine, source)]
        send += found
        if not found and not any(_is(each, pin, python, machine, source) for each in here):
            missing.append(f"{pin.name}=={pin.version}{' (its source)' if source else ''}")
    if missing:
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        raise Refusal(
            "environment",
            f"the wheelhouse lacks {', '.join(missing[:6])}{more}, for Python {python} on {machine}",
            f"where there is a network: pip download --no-deps --only-binary :all: --python-version {python} "
            "-d WHEELHOUSE NAME==VERSION; a source with --no-binary :all:",
            missing=missing,
        )
    pips = [each for each in offered if (parse_name(each) or ("",))[0] == "pip" and each.endswith(".whl")]
    return sorted(set(send + pips[-1:]))


def _is(file: str, pin: Pin, python: str, machine: str, source: bool) -> bool:
    parsed = parse_name(file)
    return parsed is not None and fits(parsed, pin, python, machine, source)


def find(roots: Roots, pin: Pin, python: str, machine: str, *, source: bool) -> str | None:
    """The path of the file here that `pin` wants, or None."""
    for each in names(roots):
        if _is(each, pin, python, machine, source):
            return os.path.join(place(roots), each)
    return None


def pip_wheel(roots: Roots) -> str | None:
    """A wheel of pip that was sent here, or None."""
    found = sorted(glob.glob(os.path.join(glob.escape(place(roots)), "pip-*.whl")))
    return found[-1] if found else None


def run(call: Call) -> Json:
    """The contract's `wheels`: `{want[{path, from}]}`, or with `stream` `{files, bytes}` that were kept.

    Two may send at once: each file has its own name on the way, and is whole or not there.
    """
    if call.args["files"] is None:
        raise Refusal("usage", "wheels needs files: [{path, sha256, bytes, mode}]")
    files = unpack.check_manifest(call.args["files"])
    strange = [file["path"] for file in files if parse_name(file["path"]) is None]
    if strange:
        raise Refusal("usage", f"{strange[0]!r:.120} is not the name of a wheel or an sdist")
    folder = place(call.roots)
    os.makedirs(folder, exist_ok=True)
    want = [file for file in files if _known_sha(folder, file["path"]) != file["sha256"]]
    if not call.args["stream"]:
        _check_room(folder, sum(file["bytes"] - _has(folder, file) for file in want))
        return {"want": [{"path": file["path"], "from": _has(folder, file)} for file in want]}
    return _receive(call, folder, {file["path"]: file for file in want})


def _receive(call: Call, folder: str, want: dict[str, Json]) -> Json:
    count = size = 0
    try:
        for member, content in tarstream.members(call.stdin):
            file = want.pop(member.name, None)
            if file is None or not member.isreg():
                raise Refusal("verify", f"the stream holds {member.name!r:.120}, which is not wanted")
            if member.size != file["bytes"] - _has(folder, file):
                raise Refusal("verify", f"{member.name} begins at another byte than asked for", "again")
            _append(content, folder, file)
            count, size = count + 1, size + member.size
    except (tarfile.TarError, EOFError) as error:
        mend = "run it again: it goes on where this ended"
        raise Refusal("verify", f"the stream of wheels ended early ({error})", mend) from None
    return {"files": count, "bytes": size}


def _append(content: tarstream.Readable, folder: str, file: Json) -> None:
    """Go on with a file; it gets its name when all of it is proven, and a damaged one goes whole."""
    path = _partial(folder, file)
    sha = hashlib.sha256()
    with open(path, "ab+") as output:
        output.seek(0)
        tarstream.copy(output, sha, None)
        tarstream.copy(content, sha, output)
        output.flush()
        os.fsync(output.fileno())
        complete = output.tell() == file["bytes"]
    if not complete:
        raise Refusal("verify", f"{file['path']} came only in part", "run it again: it goes on there")
    if sha.hexdigest() != file["sha256"]:
        os.unlink(path)
        raise Refusal("verify", f"{file['path']} arrived damaged", "run it again: that file is sent anew")
    final = os.path.join(folder, file["path"])
    os.replace(path, final)
    _remember(folder, file["path"], file["sha256"])


def _partial(folder: str, file: Json) -> str:
    return os.path.join(folder, f".part-{file['sha256'][:16]}-{file['path']}")


def _has(folder: str, file: Json) -> int:
    try:
        size = os.path.getsize(_partial(folder, file))
    except OSError:
        return 0
    if size > file["bytes"]:
        remove_quietly(_partial(folder, file))
        return 0
    return size


def _known_sha(folder: str, name: str) -> str:
    """The file's hash; noted with size and time, so that gigabytes are not read at every look."""
    path = os.path.join(folder, name)
    try:
        facts = os.lstat(path)
    except OSError:
        return ""
    noted = (read_json(os.path.join(folder, _KNOWN)) or {}).get(name) or {}
    if (noted.get("bytes"), noted.get("mtime_ns")) == (facts.st_size, facts.st_mtime_ns):
        return str(noted.get("sha256"))
    sha = unpack.digest(path)
    _remember(folder, name, sha)
    return sha


def _remember(folder: str, name: str, sha: str) -> None:
    path = os.path.join(folder, _KNOWN)
    facts = os.lstat(os.path.join(folder, name))
    noted = {"sha256": sha, "bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}
    write_json(path, {**(read_json(path) or {}), name: noted})


def _check_room(folder: str, size: int) -> None:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < size:
        words = f"{folder} has {size_words(free)} free, these wheels need {size_words(size)}"
        raise Refusal("disk", words, "give the container more disk, or invoke env.prune")
