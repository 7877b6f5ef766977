"""The front of the sandbox's `pct`: finds the subcommand, checks arguments, turns refusals into codes."""

from __future__ import annotations

import errno
import sys
import time

from . import options as opt
from .host import Failure, Host, read_pairs

REALISTIC_S = (
    0.6  # CPU time of one real call: Perl compiling its modules (measured median 0.65 s, 0.03 s of it LXC)
)

# Every name of the real command, because abbreviations are resolved among all of them.
NAMES = """
    clone config console cpusets create delsnapshot destroy df enter exec fsck fstrim help list listsnapshot
    migrate mount move-volume pending pull push reboot remote-migrate rescan resize restore resume rollback
    set shutdown snapshot start status stop suspend template unlock unmount
""".split()  # noqa: SIM905 - 38 quoted strings read worse
TRANSFER = {"perms": "string", "user": "string", "group": "string"}
OPTIONS: dict[str, dict[str, str]] = {
    "exec": {"keep-env": "boolean"},
    "push": TRANSFER,
    "pull": TRANSFER,
    "status": {"verbose": "boolean"},
    "config": {"current": "boolean"},
    "list": {},
    "start": {"skiplock": "boolean"},
    "stop": {"skiplock": "boolean"},
    "shutdown": {"timeout": "string", "forcestop": "boolean"},
    "reboot": {"timeout": "string"},
}
POSITIONAL = {
    "exec": "<vmid> [<extra-args>]",
    "push": "<vmid> <file> <destination>",
    "pull": "<vmid> <path> <destination>",
}


def main(folder: str) -> int:
    """Run one call on the sandbox at `folder`; the exit status."""
    host = Host(folder)
    try:
        settings = read_pairs(host.settings)
    except FileNotFoundError:
        settings = {}
    if settings.get("realistic") == "1":
        while time.process_time() < REALISTIC_S:
            sum(range(10_000))
    try:
        return dispatch(host, sys.argv[1:])
    except Failure as failure:
        sys.stderr.write(failure.text + "\n")
        return failure.code


def dispatch(host: Host, arguments: list[str]) -> int:
    if not arguments:
        raise Failure(255, "ERROR: no command specified\n" + overview())
    name = resolve(arguments[0])
    host.note_call(name)
    if name == "help":
        sys.stdout.write(overview() + "\n")
        return 0
    if name not in OPTIONS:
        raise Failure(255, f"'{name}' is not part of the sandbox's pct, which has: {' '.join(OPTIONS)}")
    usage = usage_of(name)
    words, options = opt.split(arguments[1:], OPTIONS[name], usage)
    if name == "list":
        _expect(words, 0, usage)
        from . import report

        return report.list_all(host)
    if not words:
        raise Failure(errno.ENOENT, f"400 not enough arguments\n{usage}")
    if name == "exec":
        from . import execute

        vmid = opt.vmid_of(words[0], usage)
        return execute.run(host, vmid, words[1:], opt.boolean(options, "keep-env", True, usage))
    if name in ("push", "pull"):
        _expect(words, 3, usage)
        from . import transfer

        move = transfer.push if name == "push" else transfer.pull
        return move(host, opt.vmid_of(words[0], usage), words[1], words[2], options)
    _expect(words, 1, usage)
    vmid = opt.vmid_of(words[0], usage)
    if name == "status":
        from . import report

        return report.status(host, vmid, opt.boolean(options, "verbose", False, usage))
    if name == "config":
        from . import report

        return report.config(host, vmid)
    from . import lifecycle

    if name == "start":
        return lifecycle.start(host, vmid)
    if name == "stop":
        return lifecycle.stop(host, vmid)
    timeout = opt.seconds(options, "timeout", 60, usage)
    if name == "shutdown":
        return lifecycle.shutdown(host, vmid, timeout, opt.boolean(options, "forcestop", False, usage))
    return lifecycle.reboot(host, vmid, timeout)


def resolve(word: str) -> str:
    """The subcommand that `word` names or abbreviates."""
    if word in NAMES:
        return word
    matches = [name for name in NAMES if name.startswith(word)] if word else []
    if len(matches) != 1:
        raise Failure(255, f"ERROR: unknown command 'pct {word}'\n{overview()}")
    return matches[0]


def usage_of(name: str) -> str:
    positional = POSITIONAL.get(name, "" if name == "list" else "<vmid>")
    return " ".join(part for part in ("pct", name, positional, "[OPTIONS]" if OPTIONS[name] else "") if part)


def overview() -> str:
    return "USAGE: pct <COMMAND> [ARGS] [OPTIONS]\n" + "\n".join(
        f"       {usage_of(name)}" for name in OPTIONS
    )


def _expect(words: list[str], count: int, usage: str) -> None:
    if len(words) < count:
        raise Failure(errno.ENOENT, f"400 not enough arguments\n{usage}")
    if len(words) > count:
        raise Failure(errno.ENOENT, f"400 too many arguments\n{usage}")
