"""The Debian that LXC's containers begin with: built once by debootstrap, proven before each use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import SandboxError
from .pct import bubble

PACKAGES = ("bash", "iproute2", "procps", "python3", "tmux")
COMPONENTS = {"debian": "main", "ubuntu": "main,universe"}
SILENT_AT_MOST_S = 180  # of debootstrap: a mirror that does not answer
LOCK_EVERY_S = 0.5
# Of no use in a container of a test, and half of the files that each box copies and deletes again.
SURPLUS = (
    *("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/zoneinfo"),
    *("usr/share/lintian", "usr/share/bash-completion", "var/lib/apt/lists"),
)

# Process 1 of a container: it collects orphans, and on the host's SIGPWR ends all and then itself.
INIT = """\
#!/bin/bash
ip link set lo up
trap 'kill -TERM -1; ending=1' PWR
until [ "$ending" ]; do sleep infinity & wait $!; done
while set -- /proc/[0-9]*; [ $# -gt 1 ]; do sleep 0.05; done
"""


def cache_dir() -> Path:
    """`$PCTRUN_ROOTFS_CACHE`, else a folder of the user's cache."""
    named = os.environ.get("PCTRUN_ROOTFS_CACHE")
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pctrun" / "rootfs"


def base() -> Path:
    """The tree to copy: found whole, or built now (a minute). Raises SandboxError."""
    system = _system()
    name = f"{system['ID']}-{system['VERSION_CODENAME']}-{_recipe(system)}"
    cache = cache_dir()
    tree, record = cache / name, cache / f"{name}.json"
    with _locked(cache):
        if _whole(tree, record):
            return tree
        for old in (record, record.with_suffix(".draft")):
            old.unlink(missing_ok=True)
        bubble.clear(str(tree))
        draft = cache / f"{name}.building"
        bubble.clear(str(draft))
        _build(system, cache, draft)
        _finish(draft)
        draft.rename(tree)
        half = record.with_suffix(".draft")
        half.write_text(json.dumps({"schema": 1, "sha256": digest(tree), "packages": PACKAGES}), "utf-8")
        half.replace(record)  # the last step: a tree without a record is none
    return tree


def digest(tree: Path) -> str:
    """One hash over every name, kind, mode, owner, link and byte under `tree` (200 MB: half a second)."""
    total = hashlib.sha256()
    for parent, folders, files in os.walk(tree):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(parent, name)
            facts = path.lstat()
            total.update(
                f"{path.relative_to(tree)}\0{facts.st_mode:o} {facts.st_uid} {facts.st_gid}\0".encode()
            )
            if stat.S_ISLNK(facts.st_mode):
                total.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(facts.st_mode):
                with path.open("rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _whole(tree: Path, record: Path) -> bool:
    try:
        expected = json.loads(record.read_text("utf-8"))["sha256"]
    except (OSError, ValueError, KeyError):
        return False
    if tree.is_dir() and digest(tree) == expected:
        return True
    _say(f"{tree} is not what was built; it is built again")
    return False


def _system() -> dict[str, str]:
    """This machine's own distribution: the container must be able to run this machine's interpreters."""
    lines = Path("/etc/os-release").read_text("utf-8").splitlines()
    pairs = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    if pairs.get("ID") not in COMPONENTS or not pairs.get("VERSION_CODENAME"):
        name = pairs.get("PRETTY_NAME", "neither")
        raise SandboxError(
            f"--engine lxc builds its containers from Debian or Ubuntu; this is {name}",
            "leave --engine out: the bubblewrap box takes this machine's own files",
        )
    return pairs


def _recipe(system: dict[str, str]) -> str:
    """Names what a tree is made from, so that a change makes a new one."""
    text = json.dumps([PACKAGES, SURPLUS, INIT, system["ID"], system["VERSION_CODENAME"]])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _mirror(system: dict[str, str]) -> str | None:
    """`$PCTRUN_DEBIAN_MIRROR`, else what apt uses for this suite, else None: what debootstrap chooses."""
    named = os.environ.get("PCTRUN_DEBIAN_MIRROR")
    if named:
        return named
    command = [
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
    ]
    with contextlib.suppress(OSError):
        told = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
        for line in told.splitlines():
            uri, *rest = line.split(" ")
            if rest == [system["VERSION_CODENAME"], "main"]:
                return uri
    return None


def _build(system: dict[str, str], cache: Path, draft: Path) -> None:
    """Run debootstrap. Packages that are here already, checked by their hash, are not fetched again."""
    suite, mirror = system["VERSION_CODENAME"], _mirror(system)
    packages, log_path = cache / "packages", cache / "debootstrap.log"
    packages.mkdir(exist_ok=True)
    source = f" from {mirror}" if mirror else ""
    _say(f"building {system['ID']} {suite} for the containers{source} (a minute, once)")
    # Its mounts and processes are in name spaces of their own and end with us, however we end.
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    command += ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", "--force-check-gpg"]
    command += [
        f"--components={COMPONENTS[system['ID']]}",
        f"--cache-dir={packages}",
        suite,
        str(draft),
        *([mirror] if mirror else []),
    ]
    last = ""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LC_ALL": "C", "DPKG_FORCE": "unsafe-io"},
        )
        assert process.stdout is not None
        try:
            for line in _lines(process.stdout.fileno()):
                log.write(line + b"\n")
                last = line.decode(errors="replace").strip() or last
                _progress(last)
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
            process.stdout.close()
            _progress("")
    if code != 0:
        raise SandboxError(
            f"debootstrap of {suite} from {mirror} failed: {last or f'status {code}'}",
            f"see {log_path}; PCTRUN_DEBIAN_MIRROR names another mirror",
        )


def _finish(tree: Path) -> None:
    """What debootstrap does not do: an init, and no files that only cost the copy time."""
    for name in SURPLUS:
        bubble.clear(str(tree / name))
        (tree / name).mkdir()
    for package in (tree / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    init = tree / "sbin" / "init"
    init.unlink(missing_ok=True)
    init.write_text(INIT, "utf-8")
    init.chmod(0o755)


def _lines(source: int) -> Iterator[bytes]:
    """Lines as they come; an end after SILENT_AT_MOST_S without one."""
    rest = b""
    while select.select([source], [], [], SILENT_AT_MOST_S)[0]:
        piece = os.read(source, 65536)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    raise SandboxError(
        f"debootstrap was silent for {SILENT_AT_MOST_S} s", "PCTRUN_DEBIAN_MIRROR names another mirror"
    )


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One builder at a time; the others wait and then find the tree."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "lock").open("w")
    except OSError as error:
        raise SandboxError(
            f"cannot write to {cache}: {error.strerror}", "PCTRUN_ROOTFS_CACHE names another folder"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _progress(text: str) -> None:
    """At a terminal the last line of debootstrap, in place of the one before."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r\x1b[K{text[: columns - 1]}")
        sys.stderr.flush()
