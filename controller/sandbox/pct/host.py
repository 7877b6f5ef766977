"""The state of the pretended Proxmox host: where its files lie, which container runs, who holds a lock."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time

NODE = "sandbox"
CALLS_BYTES = 1 << 20  # of the record of calls, before it starts anew
LOCK_WAIT_S = 10.0  # what a real pct waits for a container's configuration lock
BUBBLEWRAP, LXC = ENGINES = ("bubblewrap", "lxc")  # what a container is made of


class Failure(Exception):
    """An expected refusal: its text goes to stderr, `code` is the exit status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Host:
    """Paths and facts of one sandbox folder (absolute)."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.settings = f"{folder}/settings"
        self.home = f"{folder}/host/root"  # where a login lands; stands for the host's /root

    @property
    def engine(self) -> str:
        """What the containers of this folder are made of; a folder keeps its engine until it is wiped."""
        try:
            return read_pairs(self.settings).get("engine", BUBBLEWRAP)
        except (FileNotFoundError, NotADirectoryError):
            return BUBBLEWRAP

    @property
    def lxc_path(self) -> str:
        """Where LXC's programs look for containers, in place of /var/lib/lxc.

        Outside the folder: LXC starts no unprivileged container where the way to this place is closed to its
        users.
        """
        import hashlib

        return f"/run/pctrun-sandbox/{hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]}"

    def config_path(self, vmid: int) -> str:
        return f"{self.folder}/lxc/{vmid}.conf"

    def rootfs(self, vmid: int) -> str:
        return f"{self.folder}/ct/{vmid}"

    def state_path(self, vmid: int) -> str:
        return f"{self.folder}/state/{vmid}"

    def vmids(self) -> list[int]:
        try:
            names = os.listdir(f"{self.folder}/lxc")
        except FileNotFoundError:
            return []
        return sorted(int(name[:-5]) for name in names if name.endswith(".conf") and name[:-5].isdigit())

    def config(self, vmid: int) -> dict[str, str]:
        """The container's configuration; the absence of one is an error of its own (exit status 2)."""
        try:
            return read_pairs(self.config_path(vmid))
        except FileNotFoundError:
            name = f"nodes/{NODE}/lxc/{vmid}.conf"
            raise Failure(errno.ENOENT, f"Configuration file '{name}' does not exist") from None

    def init_pid(self, vmid: int) -> int | None:
        """Process id of the container's first process, or None when it is stopped."""
        if self.engine == LXC:
            from . import lxc_programs

            return lxc_programs.init_pid(self.lxc_path, vmid)
        return live_pid(self.state_path(vmid))

    def note_call(self, name: str) -> None:
        """Add a line to the record of calls: when, which subcommand. Arguments may be secret and stay out."""
        path = f"{self.folder}/calls.log"
        try:
            if os.path.getsize(path) > CALLS_BYTES:
                os.replace(path, f"{path}.1")
        except FileNotFoundError:
            pass
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{time.time():.3f} {name}\n")

    def lock(self, vmid: int) -> Lock:
        return Lock(f"{self.folder}/lock/pve-config-{vmid}.lock")

    def inner_cwd(self) -> str:
        """The current directory as the container is to see it: the login folder stands for /root."""
        try:
            here = os.getcwd()
        except FileNotFoundError:
            return "/"
        if here == self.home or here.startswith(self.home + "/"):
            return "/root" + here[len(self.home) :]
        return here


class Lock:
    """A container's configuration lock: one holder at a time, the others wait LOCK_WAIT_S and then fail."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1

    def __enter__(self) -> Lock:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if self._try():
            return self
        sys.stderr.write("trying to acquire lock...\n")
        sys.stderr.flush()
        deadline = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if self._try():
                return self
        os.close(self.fd)
        raise Failure(errno.EINTR, f"can't lock file '{self.path}' - got timeout")

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def read_pairs(path: str) -> dict[str, str]:
    """Read `key: value` lines, the format of every file that the sandbox keeps."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        pairs = (line.rstrip("\n").partition(":") for line in file if ":" in line)
        return {key.strip(): value.strip() for key, _, value in pairs}


def write_pairs(path: str, pairs: dict[str, str], mode: int = 0o644) -> None:
    """Write `key: value` lines so that a reader sees the old file or the new one, never a half."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(f"{key}: {value}\n" for key, value in pairs.items())
    os.replace(draft, path)


def start_time(pid: int) -> str | None:
    """Start time of a living process in clock ticks since boot; None for a dead one or a zombie.

    Together with the id it names a process for good: ids are used again, the pair is not.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def live_pid(path: str) -> int | None:
    """The process that a state file names (`pid`, `start`), if it is still that process."""
    try:
        pairs = read_pairs(path)
        pid = int(pairs["pid"])
        return pid if start_time(pid) == pairs["start"] else None
    except (FileNotFoundError, NotADirectoryError, KeyError, ValueError):
        return None
