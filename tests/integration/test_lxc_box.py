"""The product on parts that nobody here wrote: OpenSSH's server, Debian's LXC, an unprivileged container."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controller import inventory, links, sandbox, stopping
from controller.call import call
from controller.deadline import Deadline
from controller.errors import Unreachable
from controller.sandbox import SandboxError, needs, rootfs
from controller.sandbox.pct.host import Host
from tests.faults.table import fault

pytestmark = pytest.mark.timeout(900)  # the first test waits for debootstrap
STEPS = "--set=train.steps=60"  # long enough to be stopped in the middle on a fast machine
FOR_EVER = "--set=train.steps=100000"


@pytest.fixture(scope="module")
def lxc(tiny):
    """The project on the second engine: box `sandbox` is privileged, `guest` unprivileged, `idle` is off."""
    try:
        needs.check("lxc")
        rootfs.base()
    except SandboxError as error:
        pytest.skip(f"no LXC on this machine: {error.message}; {error.hint}")
    inventory = tiny.folder / "inventory.yaml"
    head, mark, tail = inventory.read_text("utf-8").partition("  sandbox:\n")
    tail = tail.replace("\n\n", "\n    secrets: {FROM_THE_DESK: env:PATH}\n\n", 1)
    body = tail.partition("\n\n")[0]
    others = [
        f"  {name}:\n{body.replace('vmid: 200', f'vmid: {vmid}')}\n"
        for name, vmid in (("guest", 201), ("idle", 202))
    ]
    inventory.write_text(f"{head}{''.join(others)}{mark}{tail}", "utf-8")
    tiny.invoke("sandbox.up", "--engine", "lxc")
    return tiny


def pct(project, *arguments: str, code: int = 0) -> str:
    """What the sandbox's pct printed, called on the host itself."""
    command = [str(project.sandbox / "bin" / "pct"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == code, (arguments, done)
    return done.stdout


def secret_of(project, *where: str) -> str:
    """What the trainer has in its environment from the workstation's."""
    script = "tr '\\0' '\\n' </proc/$(pgrep -of -- '-m trainer')/environ | sed -n s/^FROM_THE_DESK=//p"
    return project.invoke("exec", *where, "sh", "--arg=-c", f"--arg={script}").strip()


def lxc_program(project, program: str, vmid: int, *arguments: str) -> str:
    path = Host(str(project.sandbox)).lxc_path
    command = [program, "-P", path, "-n", str(vmid), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def terminal(project, keys_after: str, keys: bytes, *arguments: str) -> str:
    """What a person sees who types the command and, with `keys_after` on the screen, presses `keys` until it
    ends: a terminal that is just being set up throws away what was typed before."""
    child, master = pty.fork()
    if child == 0:
        os.chdir(project.folder)
        os.execve(sys.executable, [sys.executable, "-m", "invoke", *arguments], project.environment)
    screen, pressed, ends_at = b"", 0.0, time.monotonic() + 180
    while time.monotonic() < ends_at:
        if select.select([master], [], [], 0.5)[0]:
            try:
                screen += os.read(master, 65536)
            except OSError:  # the command has ended
                break
        if keys_after.encode() in screen and time.monotonic() - pressed > 2:
            with contextlib.suppress(OSError):
                os.write(master, keys)
            pressed = time.monotonic()
    os.close(master)
    assert pressed, screen
    os.waitpid(child, 0)
    return screen.decode(errors="replace")


def test_the_whole_job_in_a_privileged_container(lxc) -> None:
    """deploy, start fresh, healthy, status, abort, resume, watch until finished: nothing is lost."""
    assert lxc.ask("deploy")["outcome"] == "deployed"
    first = lxc.ask("restart", "--fresh-cache", STEPS)["start"]
    assert first["cache"]["choice"] == "fresh"
    lxc.invoke("wait", "--until", "healthy", "--timeout", "500")
    screen = lxc.invoke("status")
    assert screen.splitlines()[0].startswith("sandbox/200  HEALTHY")
    stopped = lxc.ask("abort")
    assert (stopped["outcome"], stopped["lost_steps"], stopped["survivors"]) == ("stopped", 0, [])
    assert lxc.ask("status", code=5)["verdict"] == "stopped"
    assert stopped["step"] < 60
    second = lxc.ask("restart", STEPS)["start"]
    assert second["resume_from"]["step"] == stopped["checkpoint"]["step"]
    assert lxc.ask("watch", "--every", "0.5")["verdict"] == "finished"
    done = lxc.ask("status")
    assert (done["verdict"], done["snapshot"]["run"]["state"]["step"]) == ("finished", 60)
    runs = "/var/lib/pctrun/runs"
    lines = lxc.sh(f"cat {runs}/{first['run']}/metrics.jsonl {runs}/{second['run']}/metrics.jsonl")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == list(range(1, 61))


def test_every_look_at_the_container_and_its_history(lxc, tmp_path: Path) -> None:
    checks = {check["name"]: check["state"] for check in lxc.ask("doctor")["checks"]}
    assert {"failed", "warning"}.isdisjoint(checks.values()), checks
    assert checks["host key"] == checks["pct"] == checks["container"] == checks["tmux"] == "ok"
    assert [row["verdict"] for row in lxc.ask("runs")["runs"]] == ["finished", "stopped"]
    assert lxc.ask("runs.show", "r-0002")["provenance"]["packages"]["torch"]
    assert lxc.ask("runs.diff", "r-0001", "r-0002")["outcome"]
    got = Path(lxc.ask("fetch", "r-0002", "--out", str(tmp_path))["path"])
    assert (got / "model.safetensors").is_file()
    assert "loss" in lxc.invoke("plot", "r-0001,r-0002")
    assert "step-000060" in lxc.invoke("logs", "--grep", "checkpoint")
    assert lxc.ask("env.list")["environments"] == []
    assert "pct exec 200 -- " in lxc.invoke("attach", "--print", "--run", "r-0002", code=None)
    assert lxc.ask("runs.pin", "r-0001", "--reason", "kept")["changed"]
    assert lxc.ask("runs.prune", "--keep", "1")["kept"]["r-0001"] == "pinned"
    lxc.invoke("runs.pin", "r-0001", "--off")
    assert lxc.ask("runs.prune", "--keep", "1", "--yes")["removed"] == ["r-0001"]


def test_arguments_bytes_and_statuses_survive_both_real_programs(lxc) -> None:
    words = ["é→漢", "a b", "$HOME", "'", "", "--", "\n"]
    out = lxc.invoke("exec", "printf", *(f"--arg={each}" for each in ("%s\\0", *words)))
    assert out == "".join(f"{each}\0" for each in words)
    lxc.sh("exit 3", code=3)
    lxc.sh("kill -9 $$", code=137)
    data = os.urandom(1 << 20)
    sent = subprocess.run(
        [sys.executable, "-m", "invoke", "exec", "--stdin", "cat"],
        cwd=lxc.folder,
        env=lxc.environment,
        input=data,
        capture_output=True,
        timeout=300,
    )
    assert (sent.returncode, sent.stdout) == (0, data), sent.stderr


def test_a_second_release_and_the_way_back(lxc) -> None:
    before = lxc.ask("deploy")
    assert (before["outcome"], before["round_trips"]) == ("unchanged", 1)
    (lxc.folder / "remote_payload" / "examples" / "another.txt").write_text("x")
    assert lxc.ask("deploy")["outcome"] == "deployed"
    assert lxc.ask("rollback")["release"] == before["release"]
    (lxc.folder / "remote_payload" / "examples" / "another.txt").unlink()


@fault(
    "a model that the root of an unprivileged container may not read",
    promised="refused before the start with the file's name; doctor says it, too",
    seen="exit 9, `model.safetensors`, `chmod`; doctor: `may not read`",
    part="place",
)
def test_an_unprivileged_container_is_no_different(lxc) -> None:
    """Its root is nobody on the host; a stop in the middle of a run, which empties its /run, is told."""
    guest = ("--box", "guest")
    assert lxc.ask("deploy", *guest)["outcome"] == "deployed"
    assert lxc.invoke("exec", *guest, "id", "--arg=-u") == "0\n"
    pct(lxc, "push", "201", str(lxc.folder / "tasks.py"), "/root/pushed")
    assert (lxc.sandbox / "ct" / "201" / "root/pushed").stat().st_uid == 100_000
    pct(lxc, "pull", "201", "/root/pushed", str(lxc.sandbox / "pulled"))
    assert (lxc.sandbox / "pulled").read_bytes() == (lxc.folder / "tasks.py").read_bytes()
    weights = lxc.sandbox / "models" / "tiny" / "model.safetensors"
    weights.chmod(0o600)
    refused = lxc.ask("restart", *guest, FOR_EVER, code=9)["error"]
    assert "model.safetensors" in refused["message"] and "chmod" in refused["hint"]
    checks = {check["name"]: check for check in lxc.ask("doctor", *guest, code=9)["checks"]}
    assert checks["model"]["state"] == "failed" and "may not read" in checks["model"]["says"]
    weights.chmod(0o644)
    lxc.invoke("restart", *guest, FOR_EVER)
    lxc.invoke("wait", *guest, "--until", "healthy", "--timeout", "500")
    assert secret_of(lxc, *guest) == os.environ["PATH"]
    written = lxc.sandbox / "ct" / "201" / "var/lib/pctrun/runs/r-0001/run.json"
    assert written.stat().st_uid == 100_000
    pct(lxc, "stop", "201")
    assert lxc.ask("status", *guest, code=5)["verdict"] == "not-running"
    pct(lxc, "start", "201")
    assert lxc.ask("status", *guest, code=4)["verdict"] == "crashed"
    again = lxc.ask("restart", *guest, FOR_EVER)["start"]
    assert again["resume_from"]["run"] == "r-0001"
    stopped = lxc.ask("abort", *guest)
    assert (stopped["outcome"], stopped["survivors"]) == ("stopped", [])


def test_a_container_that_is_off_is_told_so_and_stays_off(lxc) -> None:
    seen = lxc.ask("status", "--box", "idle", code=5)
    assert seen["verdict"] == "not-running" and "off" in seen["summary"]
    assert seen["mend"] == f"{lxc.sandbox}/bin/pct start 202"  # sandbox.up leaves it off
    assert lxc.ask("exec", "--box", "idle", "true", code=5)["error"]["kind"] == "container-stopped"
    assert "202        stopped" in pct(lxc, "list")
    assert not (lxc.sandbox / "ct" / "202").exists()


@pytest.fixture
def living_run(lxc, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a run in the privileged container that does not end by itself; one serves several tests."""
    monkeypatch.setenv("PCTRUN_SANDBOX", str(lxc.sandbox))
    seen = lxc.status()
    if seen["verdict"] in ("starting", "warming-up", "healthy"):
        return str(seen["snapshot"]["run"]["id"])
    return str(lxc.ask("restart", FOR_EVER)["start"]["run"])


def test_a_person_attaches_through_ssh_and_lxc_attach(lxc, living_run: str) -> None:
    """Two terminals in a row and tmux at their end; leaving it, the run goes on."""
    screen = terminal(lxc, f"[{living_run}]", b"\x02d", "attach")
    assert "detached" in screen
    assert lxc.status()["snapshot"]["run"]["tmux"]


@fault(
    "OpenSSH's server ended with all its connections, Debian's LXC behind it",
    promised="unreachable, and the same run again when it is back",
    seen="exit 7, `unreachable`; the same run and host key",
    part="way",
)
def test_the_server_goes_away_and_comes_back_as_the_same(lxc, living_run: str) -> None:
    """OpenSSH leaves its connections alive when it ends; `sandbox.down` is a lost host all the same."""
    before = sandbox.up()
    follower = lxc.start("logs", "--follow", "--lines", "1", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert follower.stdout is not None
    assert follower.stdout.readline() and follower.stdout.readline()  # the second one was followed
    assert sandbox.cut_connections()
    time.sleep(2)  # it connects anew after half a second
    follower.send_signal(signal.SIGINT)
    _, said = follower.communicate(timeout=300)
    assert follower.returncode == 130, said
    lxc.invoke("sandbox.down")
    assert "unreachable" in lxc.invoke("status", code=7).lower()
    lxc.invoke("sandbox.up")
    assert sandbox.up() == before
    seen = lxc.status()
    assert (seen["verdict"] in ("starting", "warming-up", "healthy"), seen["snapshot"]["run"]["id"]) == (
        True,
        living_run,
    )


@fault(
    "an order to a suspended container (lxc-freeze)",
    promised="given up after 45 s (here 2), and not carried out when it is resumed",
    seen="`did not begin to answer within 2 s`, `suspended`; the run is untouched",
    part="place",
)
def test_an_order_to_a_suspended_container_ends_and_is_not_carried_out_later(lxc, living_run: str) -> None:
    """`pct exec` enters a frozen container and stays silent; what it was told must not happen at its end."""
    box = inventory.load(lxc.folder / "inventory.yaml").boxes["sandbox"]
    lxc_program(lxc, "lxc-freeze", 200)
    try:
        with pytest.raises(Unreachable, match="did not begin to answer within 2 s") as caught:
            call(box, "stop", stopping.args(box, run=living_run), deadline=Deadline(begin=2.0))
        assert "suspended" in caught.value.hint
        assert "running" in pct(lxc, "status", "200")
    finally:
        lxc_program(lxc, "lxc-unfreeze", 200)
        links.close_all()
    time.sleep(1)  # the late order has reached its agent by now
    seen = lxc.status()
    assert (seen["snapshot"]["run"]["id"], seen["snapshot"]["run"]["stop"]) == (living_run, None)
    assert lxc.ask("abort")["outcome"] == "stopped"
