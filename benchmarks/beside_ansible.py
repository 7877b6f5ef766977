"""Is pctrun worth it beside Ansible? The same sshd, container and `pct` delay for both, and the bare stream.

`python benchmarks/beside_ansible.py` as root, once the environment of `make env` is there: it makes an
environment for Ansible below .sandbox (555 MB), an embedded box whose every `pct` call takes the real one's
0.6 s of CPU, and OpenSSH's own server in front of it; prints a table of medians; leaves only the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loopback_sshd import Sshd, front_for_ansible
from workstation import ROOT, Workstation, as_real

sys.path.insert(0, str(ROOT))

from controller import sandbox

ANSIBLE = ("ansible==12.3.0", "paramiko")  # brings ansible-core 2.19 and community.proxmox 1.4.0
FILES, FILE_BYTES, BIG_BYTES = 20, 2700, 100 << 20
WORK = (
    "raw command",
    f"{FILES} new files of {FILE_BYTES} bytes",
    f"{FILES} files, nothing to do",
    "one file of 100 MiB",
)


@dataclass(frozen=True)
class Rig:
    """One way in, for all three: the server's port, keys, and a folder of its own for each."""

    base: Path
    port: int
    key: Path
    host_key: str
    known_hosts: Path
    python: str

    def ssh(self, line: str, stdin: Path | None = None) -> None:
        """OpenSSH's client, a new connection, as a shell script would use it."""
        options = [f"UserKnownHostsFile={self.known_hosts}", "BatchMode=yes", "LogLevel=ERROR"]
        words = ["ssh", "-F", "none", "-p", str(self.port), "-i", str(self.key)]
        words += [word for option in options for word in ("-o", option)]
        with open(stdin or os.devnull, "rb") as source:
            subprocess.run([*words, "root@127.0.0.1", line], stdin=source, check=True, capture_output=True)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument("--rounds", type=int, default=5, help="of pctrun, of the bare stream, of Ansible's raw")
    ask.add_argument("--ansible-rounds", type=int, default=1, help="of Ansible's copies, minutes each")
    ask.add_argument("--venv", type=Path, default=ROOT / ".sandbox" / "ansible-venv", help="Ansible's")
    chosen = ask.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: needs root: the connection plugin wants to log in as root, as on a Proxmox host")
    playbook = ansible(chosen.venv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is taken down
    base = Path(tempfile.mkdtemp(prefix="pctrun-beside-"))
    os.environ["PCTRUN_SANDBOX"] = str(base / "sandbox")
    server = None
    try:
        box = sandbox.up(realistic=True)
        programs = base / "sandbox" / "bin"
        server = Sshd(base / "sshd", programs, box.identity_file.with_suffix(".pub"))
        server.start(ForceCommand=front_for_ansible(server.folder, programs))
        rig = Rig(base, server.port, box.identity_file, server.host_key, server.known_hosts, box.python)
        costs = measure(rig, playbook, chosen.rounds, chosen.ansible_rounds)
        print(table(costs))
        print(json.dumps({"load": os.getloadavg(), "cores": os.cpu_count(), "seconds": costs}))
    finally:
        if server is not None:
            server.stop()
        sandbox.down(container=True, keep_data=False)
        shutil.rmtree(base, ignore_errors=True)


def ansible(venv: Path) -> Path | None:
    """`ansible-playbook` in an environment of its own; None, with a line, when it cannot be had."""
    program = venv / "bin" / "ansible-playbook"
    if not program.exists():
        print(f"making {venv} for {' and '.join(ANSIBLE)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        done = subprocess.run([venv / "bin" / "pip", "install", "--quiet", *ANSIBLE], check=False)
        if done.returncode != 0:
            print("Ansible cannot be had from the package index; it is left out", file=sys.stderr)
            return None
    return program


def measure(
    rig: Rig, playbook: Path | None, rounds: int, ansible_rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of whole processes: {work: {who: [seconds, …]}}; the three take turns."""
    costs: dict[str, dict[str, list[float]]] = {work: {} for work in WORK}

    def note(number: int, who: str, act: Callable[[], None]) -> None:
        began = time.monotonic()
        act()
        taken = time.monotonic() - began
        costs[WORK[number]].setdefault(who, []).append(taken)
        print(f"{WORK[number]}: {who} {taken:.2f} s", file=sys.stderr)

    bare, ours = Bare(rig), Ours(rig)
    theirs = Theirs(rig, playbook) if playbook else None
    for turn in range(rounds):
        for way in (bare, ours, theirs):
            if way is None:
                continue
            who = type(way).__name__.lower()
            note(0, who, way.raw)
            if way is theirs and turn >= ansible_rounds:
                continue
            way.fresh_files(turn)
            note(1, who, way.files)
            if way is not bare:  # a stream knows nothing of what is there
                note(2, who, way.files)
            way.fresh_big(turn)
            note(3, who, way.big)
    return costs


class Bare:
    """What a shell script can do: one tar through one `pct exec`; nothing is checked."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.tar = rig, rig.base / "bare.tar"

    def raw(self) -> None:
        self.rig.ssh("pct exec 200 -- true")

    def fresh_files(self, turn: int) -> None:
        self._pack(write_files(self.rig.base / "bare", turn))

    def fresh_big(self, turn: int) -> None:
        self._pack(write_big(self.rig.base / "bare-big", turn))

    def files(self) -> None:
        self.rig.ssh("pct exec 200 -- tar -C /root -xf -", self.tar)

    big = files

    def _pack(self, folder: Path) -> None:
        subprocess.run(["tar", "-C", str(folder), "-cf", str(self.tar), "."], check=True)


class Ours:
    """`pctrun exec` and `pctrun deploy` in a project whose payload is those files, whole processes.

    A deploy also verifies each file by hash in the container, compiles and imports them and switches.
    """

    def __init__(self, rig: Rig) -> None:
        box = as_real("127.0.0.1", rig.port, rig.key, rig.host_key, 200, rig.python)
        self.desk = Workstation(rig.base / "project", box)
        self.payload = self.desk.payload

    def raw(self) -> None:
        self.desk.type("exec", "true")

    def fresh_files(self, turn: int) -> None:
        """20 files in all: a payload's skeleton and texts."""
        shutil.rmtree(self.payload, ignore_errors=True)
        for name in ("agent/__init__.py", "agent/main.py", "trainer/__init__.py", "recipes/tiny.yaml"):
            path = self.payload / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {turn} {name}\n".ljust(FILE_BYTES, "#"))
        write_files(self.payload / "trainer", turn, FILES - 4)

    def fresh_big(self, turn: int) -> None:
        write_big(self.payload / "trainer", turn)

    def files(self) -> None:
        self.desk.type("deploy")

    big = files


class Theirs:
    """ansible-playbook through community.proxmox.proxmox_pct_remote, gathering no facts, whole processes."""

    def __init__(self, rig: Rig, playbook: Path) -> None:
        self.rig, self.playbook, self.folder = rig, playbook, rig.base / "ansible"
        (self.folder / ".ssh").mkdir(parents=True)
        shutil.copy(rig.known_hosts, self.folder / ".ssh" / "known_hosts")
        facts = {
            "ansible_connection": "community.proxmox.proxmox_pct_remote",
            "ansible_host": "127.0.0.1",
            "ansible_port": rig.port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(rig.key),
            "proxmox_vmid": 200,
            "ansible_python_interpreter": rig.python,
        }
        hosts = {"all": {"hosts": {"lab": facts}}}
        (self.folder / "hosts.json").write_text(json.dumps(hosts))
        self._play("raw", {"raw": "true"})
        self._play("files", {"copy": {"src": f"{self.folder}/files/", "dest": "/root/files20/"}})
        self._play("big", {"copy": {"src": f"{self.folder}/big/big.bin", "dest": "/root/big.bin"}})

    def raw(self) -> None:
        self._run("raw")

    def fresh_files(self, turn: int) -> None:
        write_files(self.folder / "files", turn)

    def fresh_big(self, turn: int) -> None:
        write_big(self.folder / "big", turn)

    def files(self) -> None:
        self._run("files")

    def big(self) -> None:
        self._run("big")

    def _play(self, name: str, task: dict[str, object]) -> None:
        play = [{"hosts": "all", "gather_facts": False, "tasks": [task]}]
        (self.folder / f"{name}.json").write_text(json.dumps(play))

    def _run(self, name: str) -> None:
        environment = {
            **os.environ,
            "HOME": str(self.folder),
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_LOCALHOST_WARNING": "0",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            [self.playbook, "-i", "hosts.json", f"{name}.json"],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"ansible-playbook {name}: {done.stdout}{done.stderr}")


def write_files(folder: Path, turn: int, count: int = FILES) -> Path:
    """`count` texts that no earlier turn had."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"file{number:02d}.txt").write_text(f"{folder} {turn} {number}\n".ljust(FILE_BYTES, "."))
    return folder


def write_big(folder: Path, turn: int) -> Path:
    """100 MiB that nothing can compress."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "big.bin").write_bytes(random.Random(turn).randbytes(BIG_BYTES))
    return folder


def table(costs: dict[str, dict[str, list[float]]]) -> str:
    """Medians, how often Ansible's time is ours, and our speed beside the bare stream's."""
    lines = [
        "| work | bare ssh and tar | pctrun | Ansible | Ansible / pctrun | bare / pctrun |",
        "|---|---|---|---|---|---|",
    ]
    for work, taken in costs.items():
        middle = {who: statistics.median(seconds) for who, seconds in taken.items()}
        bare, ours, theirs = (middle.get(who) for who in ("bare", "ours", "theirs"))
        cells = [
            work,
            *(
                f"{value:.2f} s (n = {len(taken[who])})" if value else ""
                for who, value in (("bare", bare), ("ours", ours), ("theirs", theirs))
            ),
            f"{theirs / ours:.1f}" if theirs and ours else "",
            f"{bare / ours:.2f}" if bare and ours else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
