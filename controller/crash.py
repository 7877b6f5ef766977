"""What a run's end says about its cause, and what to do about it: nobody should have to read a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from controller import causes
from controller.causes import Cause

Json = dict[str, Any]

_RESTART = causes.RESTART
_AGAIN = f"{_RESTART}; if it comes at the same step again, its log belongs to a bug report"
_NEAR_S = 120.0  # between a driver's message and the end that it caused
# What an exception or a log says -> kind, what it means, mend. The first match counts.
_KNOWN = (
    (
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|OutOfMemoryError",
        "gpu-memory",
        "a GPU's memory did not suffice",
        f"{_RESTART} --set train.activation_checkpointing=true (slower steps, less memory), or a smaller "
        "data.budget or train.anchors",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "disk",
        "a disk was full",
        "invoke runs.prune --keep 5, or give the container more disk; then invoke restart",
    ),
    (
        r"uncorrectable ECC|GPU is lost|fallen off the bus|CUDA-capable device\(s\) is/are busy or unavail"
        r"|no CUDA-capable device",
        "gpu-lost",
        "a GPU failed or is gone",
        f"invoke doctor; {causes.reset()}",
    ),
    (
        r"illegal memory access|device-side assert|misaligned address|unspecified launch failure"
        r"|illegal instruction was encountered",
        "gpu-program",
        "a kernel on a GPU did what it must not",
        _AGAIN,
    ),
    (
        r"NCCL (?:error|WARN)|ncclUnhandledCudaError|ncclSystemError|DistBackendError",
        "nccl",
        "GPUs could not exchange gradients",
        "invoke doctor; then invoke restart",
    ),
    (
        r"unable to open shared memory|Bus error|bus error|SIGBUS",
        "shared-memory",
        "it means mostly that /dev/shm is full",
        f"a larger /dev/shm: on the Proxmox host, in /etc/pve/lxc/{causes.VMID}.conf: lxc.mount.entry: tmpfs "
        f"dev/shm tmpfs rw,nosuid,nodev,size=SIZE 0 0; then pct reboot {causes.VMID}, {_RESTART}",
    ),
    (
        r"the target's features are no numbers",
        "not-a-number",
        "the target's numbers were wrong from the first step, before any update",
        "invoke doctor proves its kernels; if they are right, fetch the model's files again",
    ),
    (
        r"lower train\.lr",
        "diverged",
        "the training diverged",
        f"{_RESTART} --from-scratch --set train.lr=LOWER",
    ),
    (
        r"fail_on_recompile|fell back to eager",
        "recompiled",
        "something had to be compiled again after the warm-up",
        f"{_RESTART} --fresh-cache; if it comes again, its log belongs to a bug report",
    ),
    (
        r"killed by the kernel: out of memory|DefaultCPUAllocator|MemoryError|Cannot allocate memory",
        "host-memory",
        "the container's memory did not suffice",
        f"on the Proxmox host: pct set {causes.VMID} -memory MIB; then {_RESTART}",
    ),
)


def explain(snapshot: Json, run: Json, end: Json, how: str) -> list[Cause]:
    """`end` is exit.json, or empty; `how` is what the headline says of it already."""
    return [
        *_last_word(run, end, how),
        *_xids(snapshot, run, end),
        *_known(snapshot, run, end),
        *_signal(end),
        *causes.room(snapshot, run),
    ]


def _last_word(run: Json, end: Json, how: str) -> Iterator[Cause]:
    block, detail = (run.get("log") or {}).get("traceback") or [], str(end.get("detail") or "")
    if end.get("code") == 2:
        says = detail or "the trainer refused to go on; the log's last line says why"
        yield Cause("refused", says, "mend what it names, then invoke restart")
    elif detail and detail != how:
        yield Cause("exit", detail)
    elif not detail and end.get("signal") != "SIGKILL" and block and block[0].startswith("Traceback"):
        yield Cause("exception", str(block[-1]))


def _known(snapshot: Json, run: Json, end: Json) -> Iterator[Cause]:
    """What the exception means; only without one, what the last lines of the log mean."""
    log = run.get("log") or {}
    for lines in ([str(end.get("detail") or ""), *(log.get("traceback") or [])], log.get("tail") or []):
        text = "\n".join(map(str, lines))
        for pattern, kind, says, mend in _KNOWN:
            if re.search(pattern, text):
                yield _with_strangers(snapshot, Cause(kind, says, _by_the_driver(snapshot, kind, mend)))
                return


def _by_the_driver(snapshot: Json, kind: str, mend: str) -> str:
    """What the driver said of the card tells a program's fault from the card's. Its words are in the host's
    kernel log, which most containers may not read; `doctor` reads it there."""
    if snapshot.get("xids") is not None or kind not in ("gpu-program", "nccl"):
        return mend
    return f"invoke doctor (the host's Xid lines: was it the card?); then {mend.rpartition('then ')[2]}"


def _with_strangers(snapshot: Json, cause: Cause) -> Cause:
    """Memory may have been short because somebody else held it."""
    pids = " ".join(str(each["pid"]) for each in snapshot.get("stale") or [])
    if cause.kind != "gpu-memory" or not pids:
        return cause
    mend = f"invoke exec 'kill {pids}', if nobody needs it; then {_RESTART}"
    return Cause(cause.kind, f"{cause.says}; pid {pids}, of no run, holds one, too", mend)


def _signal(end: Json) -> Iterator[Cause]:
    if end.get("signal") == "SIGKILL" and "kernel" not in str(end.get("detail")):
        says = "SIGKILL comes from outside: from a person, or from the kernel for want of memory"
        yield Cause("killed", says, f"on the Proxmox host: dmesg | grep -i oom tells which; then {_RESTART}")


def _xids(snapshot: Json, run: Json, end: Json) -> Iterator[Cause]:
    """What the driver said of a GPU while the run lived; of a program's own errors only those at its end."""
    grave = causes.grave_xid(snapshot, run)
    if grave is not None:
        mend = f"invoke doctor; {causes.reset(grave['bus'])}"
        yield Cause("xid", causes.said(grave, snapshot["now"]), mend)
        return
    died = end.get("at") or (run.get("state") or {}).get("heartbeat")
    near = [each for each in snapshot.get("xids") or [] if died and abs(each["at"] - died) < _NEAR_S]
    if near:
        yield Cause("gpu-program", causes.said(near[-1], snapshot["now"]), _AGAIN)
