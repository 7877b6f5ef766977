"""`pct exec`: one command in the container; environment, directory, arguments and status as real."""

from __future__ import annotations

import errno
import os
import sys

# not `signal`, which imports enum: 7 ms, a fifth of a call
from _signal import SIG_DFL, SIGINT, SIGXFSZ, signal  # type: ignore[import-not-found]

from . import enter
from .host import LXC, Failure, Host

# pct sets this PATH for itself and keep-env carries it into the container: no /usr/local/bin there.
KEPT_PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"
CLEAN_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONFIGURED = {b"container": b"lxc", b"TERM": b"linux"}  # what the container's configuration adds
REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


def run(host: Host, vmid: int, command: list[str], keep_env: bool) -> int:
    """Run `command` in the container and return what `pct` exits with."""
    if not command:
        raise Failure(255, "missing command at pct exec")
    host.config(vmid)
    init = host.init_pid(vmid)
    if init is None:
        raise Failure(255, f"container '{vmid}' not running!")
    caller = caller_environment()
    argv = [surviving(os.fsencode(word), is_utf8(caller)) for word in command]
    if host.engine == LXC:
        from . import lxc

        signal(SIGXFSZ, SIG_DFL)  # SIGPIPE stays ignored, see `become`
        lxc.attach(host, vmid, argv, caller | {b"PATH": KEPT_PATH}, keep_env)
    cwd = host.inner_cwd()
    env = kept(caller, cwd) if keep_env else {b"PATH": CLEAN_PATH, **CONFIGURED}

    def become_command() -> None:
        become(vmid, argv, env, cwd)

    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
    if terminals:
        from .terminal import run_on_terminal

        return run_on_terminal(init, terminals, become_command)
    signal(SIGINT, SIG_DFL)
    enter.join(init)
    child = os.fork()
    if child == 0:
        become_command()
    return enter.wait(child)


def caller_environment() -> dict[bytes, bytes]:
    """The environment of the call, from the kernel: Python may have added LC_CTYPE to its own."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {name: value for name, _, value in pairs}


def kept(caller: dict[bytes, bytes], cwd: str) -> dict[bytes, bytes]:
    """keep-env: everything that the host's session has leaks into the container; PATH is pct's own."""
    env = {**caller, b"PATH": KEPT_PATH, **CONFIGURED}
    if b"PWD" in caller:
        env[b"PWD"] = os.fsencode(cwd)
    return env


def is_utf8(env: dict[bytes, bytes]) -> bool:
    locale = next((env[name] for name in (b"LC_ALL", b"LC_CTYPE", b"LANG") if env.get(name)), b"C")
    return locale.lower().replace(b"-", b"").partition(b"@")[0].endswith(b".utf8")


def surviving(argument: bytes, utf8: bool) -> bytes:
    """What is left of an argument: in a C locale each byte of 0x80 and above becomes U+FFFD."""
    if utf8:
        return argument.decode("utf-8", "replace").encode()
    return b"".join(bytes([byte]) if byte < 0x80 else REPLACEMENT for byte in argument)


def become(vmid: int, argv: list[bytes], env: dict[bytes, bytes], cwd: str) -> None:
    """Replace this process by the command; does not return.

    SIGPIPE stays ignored, as Python starts with it: the real pct loads a module that ignores it, too.
    """
    signal(SIGXFSZ, SIG_DFL)
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir("/")
    os.umask(0o022)
    try:
        search_and_exec(argv, env)
    except OSError as error:
        name = argv[0].decode("utf-8", "replace")
        sys.stderr.write(f'lxc-attach: {vmid}: {os.strerror(error.errno or 0)} - Failed to exec "{name}"\n')
        sys.stderr.flush()
        os._exit(127 if error.errno == errno.ENOENT else 126)


def search_and_exec(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """What execvp of the C library does; `os.execvpe` would import a module out of the container."""
    name, refusal = argv[0], errno.ENOENT
    folders = [b""] if b"/" in name else [folder + b"/" for folder in env[b"PATH"].split(b":")]
    for folder in folders if name else []:
        try:
            os.execve(folder + name, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno == errno.ENOEXEC:  # a script without a first line
                os.execve(b"/bin/sh", [b"sh", folder + name, *argv[1:]], env)
            refusal = error.errno or refusal
    raise OSError(refusal, os.strerror(refusal))
