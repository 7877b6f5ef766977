"""Does anything grow or stay behind when a run is looked at for half an hour and restarted all the time?

`python benchmarks/soak.py --seconds 1800`: an embedded box of its own, a stand-in trainer that writes 5 MB of
log a second, two workstations. On one a watch stays open and the run is restarted; the other follows the log;
both ask for the status every second. Memory, open files and threads of the watch, of its agent in the
container and of the box's server are sampled. Exit 1 when one grows, when a zombie stays, when a process is
left in the container, or when a command answers with something that was not due.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sampling import Sampler, inside, zombies
from workstation import ROOT, Workstation, as_real

sys.path.insert(0, str(ROOT))

from controller import sandbox

STEP_S = 0.1
RUN_IDS = "/var/lib/pctrun/runs"
DUE = {0: "healthy", 2: "degraded", 5: "stopped", 6: "starting"}  # 5 MB a second is log-growth: degraded
LOG_AT_MOST = 330 << 20  # of one run on disk: the contract's 320 MiB, and what comes until the next look
CALM_S = 15.0  # for what is ending when the last command has ended


class Soak:
    """One soak: `findings` is what should not have been, `facts` what was counted."""

    def __init__(self, base: Path, endpoint: sandbox.Endpoint, log_mb_s: float) -> None:
        self.base, self.findings, self.over = base, list[str](), threading.Event()
        box = as_real(
            endpoint.host,
            endpoint.port,
            endpoint.identity_file,
            endpoint.host_key,
            endpoint.vmid,
            endpoint.python,
        )
        box |= {"grace_s": 20}
        self.ana, self.ben = (Workstation(base / name, box) for name in ("ana", "ben"))
        self._payload(self.ana.payload, int(log_mb_s * 1e6 * STEP_S))
        self.server, self.init = facts().server_pid or 0, facts().container_pid or 0
        self.watch: subprocess.Popen[str] | None = None
        self.reader: subprocess.Popen[str] | None = None
        self.codes: Counter[int] = Counter()
        self.restarts = self.followed = 0
        self.log_peak = 0

    def run(self, seconds: float, restart_every_s: float, every_s: float) -> Sampler:
        self.ana.type("deploy")
        before = self._calm({})
        self.ana.type("restart")
        loops = [threading.Thread(target=self._ask, args=(who,), daemon=True) for who in (self.ana, self.ben)]
        loops.append(threading.Thread(target=self._follow, daemon=True))
        with self._watching():
            sampler = Sampler(self._watched, lambda: (os.getpid(), self.server, self.init), every_s)
            for loop in loops:
                loop.start()
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                time.sleep(min(restart_every_s, max(0.0, ends - time.monotonic())))
                self._weigh_logs()
                if time.monotonic() < ends:
                    self.ana.type("restart", "--reason", "soak")
                    self.restarts += 1
            sampler.stop()  # before the end, at which everything becomes smaller
            self.over.set()
            self.ana.type("abort", "--reason", "the soak is over")
            for loop in loops:
                loop.join()
        after = self._calm(before)
        left = [" ".join(argv)[:120] for pid, argv in after.items() if pid not in before]
        self.findings += [f"left in the container: {line}" for line in left]
        self.findings += [f"still a zombie: {name}" for name in zombies((self.server, self.init)).values()]
        self.findings += sampler.growth() + sampler.zombies
        return sampler

    def _payload(self, folder: Path, log_bytes: int) -> None:
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "remote_payload" / "agent", folder / "agent", ignore=without)
        shutil.copytree(ROOT / "tests" / "agent" / "standin", folder, ignore=without, dirs_exist_ok=True)
        recipe = {"steps": 10**9, "model": "model", "behave": "train", "step_s": STEP_S, "tokens": 1000}
        recipe |= {"save_every": 20, "log_bytes": log_bytes}
        (folder / "recipes" / "tiny.yaml").write_text(json.dumps(recipe))

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """`pctrun watch` on a terminal of 100 by 38; it must end by itself when the run has ended."""
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 38, 100, 0, 0))
        self.watch = self.ana.start("watch", "--every", "1", stdin=its, stdout=its, stderr=its)
        os.close(its)
        reader = threading.Thread(target=_drain, args=(ours,), daemon=True)
        reader.start()
        try:
            yield
            if self.watch.wait(30) != 5:
                self.findings.append(f"the watch ended with {self.watch.returncode}, not 5 (stopped)")
        except subprocess.TimeoutExpired:
            self.findings.append("the watch did not end with its run")
        finally:
            self.watch.kill()
            self.watch.wait()
            reader.join()

    def _ask(self, who: Workstation) -> None:
        """The status every second, as far as the machine comes along."""
        while not self.over.wait(1.0):
            process = who.start("status", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            out, err = process.communicate()
            self.codes[process.returncode] += 1
            if process.returncode not in DUE:
                said = json.loads(out)["boxes"][0] if out else {"error": err[-400:]}
                told = {name: said.get(name) for name in ("verdict", "summary", "reasons", "error")}
                self.findings.append(f"status on {who.folder.name}: {process.returncode} {json.dumps(told)}")

    def _follow(self) -> None:
        """Every run's log to its end, read by another workstation."""
        while not self.over.is_set():
            words = ("logs", "--follow", "--lines", "10")
            self.reader = self.ben.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            err = self.reader.communicate()[1]
            self.followed += 1
            if self.reader.returncode != 0:
                self.findings.append(f"logs --follow: {self.reader.returncode} {err[-400:]}")
                time.sleep(1)

    def _watched(self) -> list[tuple[str, int]]:
        """The two that stream, the server, and the agents (programs from stdin) in the container.

        The watch's is the oldest; of the others only the log's live long enough to be judged.
        """
        assert self.watch is not None
        found = [("watch", self.watch.pid), ("server", self.server)]
        if self.reader is not None:
            found.append(("log reader", self.reader.pid))
        agents = [pid for pid, argv in inside(self.init).items() if argv[1:3] == ["-I", "-c"]]
        for place, pid in enumerate(sorted(agents, key=_started)):
            found.append(("other agents" if place else "watch's agent", pid))
        return found

    def _weigh_logs(self) -> None:
        for path in (self.base / "sandbox" / "ct" / "200").glob(f".{RUN_IDS}/*/train.log"):
            self.log_peak = max(self.log_peak, path.stat().st_blocks * 512)
        if self.log_peak > LOG_AT_MOST:
            self.findings.append(f"a log took {self.log_peak >> 20} MiB of disk")

    def _calm(self, wanted: dict[int, list[str]]) -> dict[int, list[str]]:
        """What runs in the container once nothing ends any more."""
        ends = time.monotonic() + CALM_S
        while time.monotonic() < ends and set(found := inside(self.init)) - set(wanted):
            time.sleep(0.2)
        return found


def facts() -> sandbox.SandboxStatus:
    return sandbox.status()


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return sys.maxsize


def _drain(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
    os.close(terminal)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ask.add_argument("--seconds", type=float, default=1800, help="how long (default: 1800)")
    ask.add_argument("--restart-every", type=float, default=60, help="seconds between restarts (default: 60)")
    ask.add_argument("--sample-every", type=float, default=1, help="seconds between samples (default: 1)")
    ask.add_argument("--log-mb-s", type=float, default=5, help="megabytes of log a second (default: 5)")
    chosen = ask.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is taken down
    base = Path(tempfile.mkdtemp(prefix="pctrun-soak-")).resolve()
    os.environ["PCTRUN_SANDBOX"] = str(base / "sandbox")
    try:
        soak = Soak(base, sandbox.up(), chosen.log_mb_s)
        sampler = soak.run(chosen.seconds, chosen.restart_every, chosen.sample_every)
    finally:
        sandbox.down(container=True, keep_data=False)
        shutil.rmtree(base, ignore_errors=True)
    answers = ", ".join(f"{count} × {DUE.get(code, code)}" for code, count in sorted(soak.codes.items()))
    print(
        f"{sum(soak.codes.values())} statuses ({answers}), {soak.restarts} restarts, "
        f"{soak.followed} logs followed to their end, {sampler.looks} samples, "
        f"largest log on disk {soak.log_peak >> 20} MiB, load {os.getloadavg()[0]:.1f}"
    )
    for line in sampler.lines():
        print(f"  {line}")
    for finding in soak.findings:
        print(f"  FOUND  {finding}")
    print("nothing grew, nothing stayed" if not soak.findings else f"{len(soak.findings)} findings")
    sys.exit(1 if soak.findings else 0)


if __name__ == "__main__":
    main()
