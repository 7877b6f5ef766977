"""`pct status | list | config` in the real layouts, because whoever parses them must meet the real traps."""

from __future__ import annotations

import os
import sys
import time

from .host import Host, start_time

MIB = 1024 * 1024


def status(host: Host, vmid: int, verbose: bool) -> int:
    config = host.config(vmid)
    init = host.init_pid(vmid)
    state = "stopped" if init is None else "running"
    if not verbose:
        print(f"status: {state}")
        return 0
    facts: dict[str, object] = dict.fromkeys(
        ("cpu", "disk", "diskread", "diskwrite", "mem", "netin", "netout", "swap", "uptime"), 0
    )
    facts |= {
        "cpus": config.get("cores", os.cpu_count()),
        "maxdisk": _disk_bytes(host.folder),
        "maxmem": int(config.get("memory", "512")) * MIB,
        "maxswap": int(config.get("swap", "512")) * MIB,
        "name": config.get("hostname", f"CT{vmid}"),
        "status": state,
        "type": "lxc",
        "vmid": vmid,
    }
    if init is not None:
        facts |= {"pid": init, "uptime": _uptime_s(init)}
    if "lock" in config:
        facts["lock"] = config["lock"]
    for key in sorted(facts):
        print(f"{key}: {facts[key]}")
    return 0


def list_all(host: Host) -> int:
    """A table of fixed widths 10, 10, 12, 20; nothing at all when there is no container."""
    rows = [("VMID", "Status", "Lock", "Name")]
    for vmid in host.vmids():
        config = host.config(vmid)
        state = "stopped" if host.init_pid(vmid) is None else "running"
        rows.append((str(vmid), state, config.get("lock", ""), config.get("hostname", f"CT{vmid}")))
    if len(rows) > 1:
        sys.stdout.writelines(f"{a:<10} {b:<10} {c:<12} {d:<20}\n" for a, b, c, d in rows)
    return 0


def config(host: Host, vmid: int) -> int:
    """Sorted `key: value` lines, raw `lxc.*` lines last, the digest left out."""
    pairs = host.config(vmid)
    for key in sorted(pairs, key=lambda key: (key.startswith("lxc."), key)):
        if key != "digest":
            print(f"{key}: {pairs[key]}")
    return 0


def _disk_bytes(folder: str) -> int:
    disk = os.statvfs(folder)
    return disk.f_blocks * disk.f_frsize


def _uptime_s(pid: int) -> int:
    ticks = int(start_time(pid) or 0)
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
