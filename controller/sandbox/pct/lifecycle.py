"""`pct start | stop | shutdown | reboot`: under the configuration lock, every failure is exit status 255."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from . import bubble, lxc
from .host import LXC, Failure, Host

KILL_WAIT_S = 10.0


def start(host: Host, vmid: int) -> int:
    return _worker(host, vmid, _start)


def stop(host: Host, vmid: int) -> int:
    def work(host: Host, vmid: int) -> None:
        _refuse_locked(host, vmid)
        _end(host, vmid, clean_s=0, force=True)

    return _worker(host, vmid, work)


def shutdown(host: Host, vmid: int, timeout: int, force: bool) -> int:
    def work(host: Host, vmid: int) -> None:
        _refuse_locked(host, vmid)
        _end(host, vmid, clean_s=timeout, force=force)

    return _worker(host, vmid, work)


def reboot(host: Host, vmid: int, timeout: int) -> int:
    """Stop, then start. A locked container is stopped and then not started, as on the real host."""

    def work(host: Host, vmid: int) -> None:
        _end(host, vmid, clean_s=timeout, force=True)
        _start(host, vmid)

    return _worker(host, vmid, work)


def _worker(host: Host, vmid: int, work: Callable[[Host, int], None]) -> int:
    try:
        with host.lock(vmid):
            host.config(vmid)
            work(host, vmid)
    except Failure as failure:
        raise Failure(255, failure.text) from None
    return 0


def _refuse_locked(host: Host, vmid: int) -> None:
    lock = host.config(vmid).get("lock")
    if lock:
        raise Failure(255, f"CT is locked ({lock})")


def _start(host: Host, vmid: int) -> None:
    _refuse_locked(host, vmid)
    if host.init_pid(vmid) is not None:
        raise Failure(255, f"CT {vmid} already running")
    engine = lxc if host.engine == LXC else bubble
    engine.start(host, vmid, host.config(vmid))


def _end(host: Host, vmid: int, clean_s: float, force: bool) -> None:
    """End the container: ask init first when `clean_s` > 0, kill when `force`.

    Init is dead only when the kernel has ended and collected every process of its space: nothing is left.
    """
    init = host.init_pid(vmid)
    if init is None:
        raise Failure(255, f"CT {vmid} not running")
    if host.engine == LXC:
        lxc.end(host, vmid, clean_s, force)
        return
    handle = os.pidfd_open(init)
    try:
        ended = host.init_pid(vmid) is None  # again, now that the handle pins the process
        if not ended and clean_s > 0:
            ended = _ask_to_halt(host, vmid) and _wait(handle, clean_s)
        if not ended and force:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            ended = _wait(handle, KILL_WAIT_S)
    finally:
        os.close(handle)
    if not ended:
        raise Failure(255, f"CT {vmid} did not stop: got timeout")
    os.unlink(host.state_path(vmid))


def _ask_to_halt(host: Host, vmid: int) -> bool:
    try:
        pipe = os.open(f"{host.rootfs(vmid)}/run/initctl", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(pipe, b"halt\n")
    os.close(pipe)
    return True


def _wait(handle: int, timeout_s: float) -> bool:
    return bool(select.select([handle], [], [], timeout_s)[0])
