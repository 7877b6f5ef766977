"""The way to a box and its host: from the workstation's key to a container that is up and not locked."""

from __future__ import annotations

from collections.abc import Iterator

from controller import pct, words
from controller.checks import FAILED, Check, Json, failed, ok, skipped, warning
from controller.endpoint import Endpoint
from controller.errors import HostKeyRefused, LoginRefused, PctrunError

WAY, HOST = "way", "host"
WAY_CHECKS = ("ssh", "host key", "login")
HOST_CHECKS = ("pct", "container", "clock")
SKEW_S = 2.0  # beyond this the times of two machines' logs no longer compare


def way(endpoint: Endpoint | None, seconds: float, error: PctrunError | None) -> Iterator[Check]:
    """`error` is why there is no connection; its kind tells how far we came."""
    if error is None and endpoint is not None:
        yield ok(WAY, "ssh", f"{where(endpoint)} answers in {words.duration(seconds)}")
        known = "pinned in inventory.yaml" if endpoint.host_key else f"known in {endpoint.known_hosts}"
        yield ok(WAY, "host key", "the embedded box's own" if endpoint.embedded else known)
        yield ok(WAY, "login", f"as {endpoint.user or 'ssh_config says'}{', then sudo' * endpoint.sudo}")
        return
    assert error is not None
    reached = WAY_CHECKS.index(
        "host key"
        if isinstance(error, HostKeyRefused)
        else "login"
        if isinstance(error, LoginRefused)
        else "ssh"
    )
    for name in WAY_CHECKS[:reached]:
        yield ok(WAY, name, "the host answers" if name == "ssh" else "as it should be")
    mend = error.hint or "is the host up, is the way to it free?"
    yield failed(WAY, WAY_CHECKS[reached], error.message, mend, code=error.exit_code)
    yield from skipped(WAY, WAY_CHECKS[reached + 1 :], "the way ends before it")


def where(endpoint: Endpoint) -> str:
    port = f":{endpoint.port}" if endpoint.port not in (None, 22) else ""
    return f"{endpoint.host}{port}"


def host(look: Json, endpoint: Endpoint) -> Iterator[Check]:
    """From the facts of hostlook."""
    asked = _pct(look, endpoint)
    yield asked
    if asked.state == FAILED:
        yield from skipped(HOST, ["container"], "without pct it cannot be asked for")
    else:
        yield _container(look, endpoint)
    yield _clock(look, endpoint)


def _pct(look: Json, endpoint: Endpoint) -> Check:
    if not look["pct"] and look["status_code"] != 0:
        return failed(
            HOST,
            "pct",
            f"there is no pct on the PATH of this login on {endpoint.host}",
            "is it a Proxmox host? check host: in inventory.yaml, or log in as root",
            code=7,
        )
    versions = ", ".join(f"{name} {version}" for name, version in look["packages"].items())
    if versions:
        return ok(HOST, "pct", versions)
    return ok(HOST, "pct", f"{look['pct'] or 'found by sudo'}, of no Proxmox package: version not known")


def _container(look: Json, endpoint: Endpoint) -> Check:
    vmid, host_name = endpoint.vmid, endpoint.host
    if look["status_code"] is None:
        return failed(HOST, "container", "the host's answer broke off", "try again", code=7)
    if look["status_code"] != 0:
        why = pct.explain(endpoint, look["status_code"], look["status_text"])
        return failed(
            HOST, "container", why.message, why.hint or f"on {host_name}: pct status {vmid}", code=7
        )
    if look["status"] != "running":
        return failed(HOST, "container", f"{vmid} is {look['status']}", pct.start_mend(endpoint), code=5)
    if look["lock"]:
        return warning(
            HOST,
            "container",
            f"{vmid} is running, but locked ({look['lock']}): it can be neither started nor stopped",
            f"let it end; if nothing is at work any more, on {host_name}: pct unlock {vmid}",
        )
    return ok(HOST, "container", f"{vmid} is running, not locked")


def then_reboot(facts: Json, look: Json | None, endpoint: Endpoint) -> str:
    """The end of a mend that takes a new start of the container, for what this box is doing now.

    A reboot does not wait for the run's checkpoint, and nobody starts it again; of a locked container it is
    the stop alone, for `pct` then refuses the start.
    """
    lock = (look or {}).get("lock")
    unlocked = f", once its lock ({lock}) is gone (a reboot would leave it stopped):" if lock else ""
    reboot = f"pct reboot {endpoint.vmid}"
    steps = f"invoke abort, {reboot}, invoke restart" if facts["alive"] else reboot
    return f"then{unlocked} {steps}"


def _clock(look: Json, endpoint: Endpoint) -> Check:
    skew, error = look["skew_s"], look["skew_error_s"]
    if skew is None:
        return skipped(HOST, ["clock"], "the host did not tell its time")[0]
    if abs(skew) - error > SKEW_S:
        side = "ahead of" if skew > 0 else "behind"
        return warning(
            HOST,
            "clock",
            f"{endpoint.host} is {words.duration(abs(skew))} {side} this workstation",
            "timedatectl set-ntp true, on the one that is wrong",
        )
    return ok(HOST, "clock", f"within {words.duration(abs(skew) + error)} of this workstation's")
