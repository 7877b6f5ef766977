"""`pct push | pull`: one file, with the real one's traps: exit status 0 whatever happens to the copy."""

from __future__ import annotations

import grp
import os
import pwd
import sys
from collections.abc import Callable

from . import enter
from .host import Failure, Host

PIECE = 1 << 20


def push(host: Host, vmid: int, source: str, target: str, options: dict[str, str]) -> int:
    def work(init: int) -> None:
        reader = os.open(source, os.O_RDONLY)
        enter.join(init, enter.FILES)
        os.chdir("/")
        writer = _create(target)
        _own(writer, options)
        _copy(reader, writer)

    return _in_worker(host, vmid, work, "can only push files to a running CT")


def pull(host: Host, vmid: int, source: str, target: str, options: dict[str, str]) -> int:
    """The target is emptied before the source is opened: a missing source destroys an old target."""

    def work(init: int) -> None:
        writer = _create(target)
        _own(writer, options)
        enter.join(init, enter.FILES)
        os.chdir("/")
        _copy(os.open(source, os.O_RDONLY), writer)

    return _in_worker(host, vmid, work, "can only pull files from a running CT")


def _in_worker(host: Host, vmid: int, work: Callable[[int], None], refusal: str) -> int:
    """Run `work` in a child under the configuration lock. Its failure is one line on stderr, and status 0."""
    with host.lock(vmid):
        init = host.init_pid(vmid)
        if init is None:
            raise Failure(255, refusal)
        child = os.fork()
        if child == 0:
            try:
                work(init)
            except OSError as error:
                sys.stderr.write(f"failed to open {error.filename}: {error.strerror}\n")
            except ValueError as error:
                sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(0)
        enter.wait(child)
    return 0


def _create(target: str) -> int:
    """Open in place: a new file gets 0666 less the umask, an old one keeps its mode and is cut first."""
    return os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)


def _own(writer: int, options: dict[str, str]) -> None:
    """Apply --perms, --user, --group; names are looked up on the side where the file lies."""
    try:
        if "perms" in options:
            os.fchmod(writer, int(options["perms"], 8))
        if "user" in options or "group" in options:
            user, group = options.get("user", "0"), options.get("group", "0")
            os.fchown(
                writer,
                int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid,
                int(group) if group.isdigit() else grp.getgrnam(group).gr_gid,
            )
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"cannot set owner or permissions: {error}") from None


def _copy(reader: int, writer: int) -> None:
    """Copy until the end or the first error; as in the real one nobody learns of it."""
    try:
        while piece := os.read(reader, PIECE):
            view = memoryview(piece)
            while view:
                view = view[os.write(writer, view) :]
    except OSError:
        pass
