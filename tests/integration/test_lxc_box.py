"""The product on parts that nobody here wrote: OpenSSH's server, Debian's LXC, an unprivileged container."""

from __future__ import annotations

import json

import pytest

from controller.sandbox import SandboxError, needs, rootfs

pytestmark = pytest.mark.timeout(900)  # the first test waits for debootstrap


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
    body = tail.partition("\n\n")[0]
    others = [
        f"  {name}:\n{body.replace('vmid: 200', f'vmid: {vmid}')}\n"
        for name, vmid in (("guest", 201), ("idle", 202))
    ]
    inventory.write_text(f"{head}{''.join(others)}{mark}{tail}", "utf-8")
    tiny.invoke("sandbox.up", "--engine", "lxc")
    return tiny


def test_the_whole_job_in_a_privileged_container(lxc) -> None:
    """deploy, start fresh, healthy, status, abort, resume, finish: nothing lost on the way."""
    assert lxc.ask("deploy")["outcome"] == "deployed"
    long = ("--set=train.steps=100000",)
    first = lxc.ask("restart", "--fresh-cache", *long)["start"]
    assert first["cache"]["choice"] == "fresh"
    lxc.invoke("wait", "--until", "healthy", "--timeout", "120")
    screen = lxc.invoke("status")
    assert screen.splitlines()[0].startswith("sandbox/200  HEALTHY")
    stopped = lxc.ask("abort")
    assert (stopped["outcome"], stopped["lost_steps"], stopped["survivors"]) == ("stopped", 0, [])
    assert lxc.ask("status", code=5)["verdict"] == "stopped"
    last = stopped["checkpoint"]["step"] + 4
    second = lxc.ask("restart", f"--set=train.steps={last}")["start"]
    assert second["resume_from"]["step"] == stopped["checkpoint"]["step"]
    lxc.invoke("wait", "--until", "finished", "--timeout", "120")
    done = lxc.ask("status")
    assert (done["verdict"], done["snapshot"]["run"]["state"]["step"]) == ("finished", last)
    runs = "/var/lib/pctrun/runs"
    lines = lxc.sh(f"cat {runs}/{first['run']}/metrics.jsonl {runs}/{second['run']}/metrics.jsonl")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == list(range(1, last + 1))
