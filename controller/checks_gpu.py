"""Whether the GPUs are all there, whole, free and used by fast code: a run finds out an hour late."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from controller import gpu_words, words
from controller.checks import Check, Json, failed, ok, skipped, warning
from controller.checks_host import then_reboot
from controller.endpoint import Endpoint

GPU, CODE = "gpu", "code"
GPU_CHECKS = ("nodes", "driver", "count", "ecc", "xid", "throttle", "memory", "stale")
CODE_CHECKS = ("cuda", "kernels", "tracing")
BUSY_MIB = 1024  # a driver with persistence keeps a few hundred on an idle card
WORKING_PCT = 10  # of the time of nvidia-smi's last sample, which is a second at most; an idle card has 0
# A program's context takes a few hundred MiB. Without one, utilisation is the driver's own: one that starts
# only now, for want of persistence, scrubs the memory for seconds.
CONTEXT_MIB = 100
DAY_S = 86400
_REPAIRS = {
    "row": "a memory row waits to be replaced",
    "page": "a memory page waits to be put out of use",
    "channel": "a memory channel waits for its repair",
    "tpc": "a group of compute units (TPC) waits for its repair",
}
_BEYOND_REPAIR = {
    "row": "a memory row could not be replaced",
    "memory": "memory that cannot be repaired",
    "sram": "errors of the on-chip memory (SRAM) beyond NVIDIA's limit",
}
_XID = re.compile(r"^\[\s*([\d.]+)\].*NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)")
_FIRST_NATIVE = (2, 14)  # the tracing flag is a thread's own from here on (pytorch PR 168999)


def gpus(facts: Json, look: Json | None, endpoint: Endpoint, wanted: int | None) -> Iterator[Check]:
    """`wanted` is the inventory's count; `look` are the host's facts, None when it could not be asked."""
    found = facts["gpus"]
    if found["status"] == "absent" and not wanted and not facts["nodes"]:
        held = len((look or {}).get("gpus") or [])
        why = "no NVIDIA GPU in this container: a run uses its CPU"
        if held:
            why = f"none of the host's {words.plural(held, 'GPU')} is passed to this container"
        yield from skipped(GPU, GPU_CHECKS, why)
        return
    yield _nodes(facts, look, endpoint)
    yield _driver(facts, look)
    yield _count(facts, look, endpoint, wanted)
    if found["status"] == "ok":
        yield _ecc(found["rows"], endpoint)
        yield _xid(look, endpoint)
        yield _throttle(found["rows"])
        yield _memory(facts, endpoint)
    else:
        yield from skipped(GPU, ["ecc"], "nvidia-smi does not answer")
        yield _xid(look, endpoint)
        yield from skipped(GPU, ("throttle", "memory"), "nvidia-smi does not answer")
    yield _stale(facts["stale"])


def _nodes(facts: Json, look: Json | None, endpoint: Endpoint) -> Check:
    nodes, vmid, host = facts["nodes"], endpoint.vmid, endpoint.host
    names = {node["path"].removeprefix("/dev/") for node in nodes}
    cards = sorted(name for name in names if name not in ("nvidiactl", "nvidia-uvm"))
    passing = f"on {host}: pct set {vmid} -devN /dev/NAME for each (N counts up), "
    passing += then_reboot(facts, look, endpoint)
    missing = [name for name in ("nvidiactl", "nvidia-uvm") if name not in names]
    if not cards:
        return failed(GPU, "nodes", "there is no /dev/nvidia0 in the container", passing)
    if "nvidia-uvm" in missing:
        mend = f"on {host}: nvidia-modprobe -c 0 -u (at each boot); {passing.removeprefix(f'on {host}: ')}"
        return failed(GPU, "nodes", "there is no /dev/nvidia-uvm: no CUDA program can start", mend)
    if missing:
        return failed(GPU, "nodes", f"there is no /dev/{missing[0]} in the container", passing)
    shut = [node["path"] for node in nodes if node["opens"] is False]
    if shut:
        mend = f"its cgroup forbids it; {passing}; lxc.cgroup2.devices.allow lines are the older way"
        return failed(GPU, "nodes", f"{', '.join(shut)} cannot be opened", mend)
    if any(node["opens"] is None for node in nodes):
        mend = f"the driver hangs: on {host}: dmesg | grep NVRM; a reboot of {host} may be the only way"
        return failed(GPU, "nodes", "opening them does not return", mend)
    return ok(GPU, "nodes", f"{words.plural(len(cards), 'card')}, nvidiactl, nvidia-uvm; all open")


def _driver(facts: Json, look: Json | None) -> Check:
    kernel = facts["driver"]["kernel"] or (look or {}).get("driver")
    userland = facts["driver"]["userland"]
    if kernel is None:
        mend = "install the driver on the host; a container shares the host's kernel"
        return failed(GPU, "driver", "the host's kernel has no nvidia module", mend)
    same = f"in the container: NVIDIA-Linux-x86_64-{kernel}.run --no-kernel-module"
    if not userland:
        return failed(GPU, "driver", f"the kernel has {kernel}, the container no libcuda.so", same)
    if kernel not in userland:
        says = f"the kernel has {kernel}, the container's libcuda is {', '.join(userland)}"
        return failed(GPU, "driver", f"{says}: they must be the same", same)
    if len(userland) > 1:
        says = f"{kernel}, but libcuda is there as {' and '.join(userland)}"
        return warning(GPU, "driver", says, "remove the one that is not the kernel's")
    return ok(GPU, "driver", f"{kernel} in the kernel and in the container")


def _count(facts: Json, look: Json | None, endpoint: Endpoint, wanted: int | None) -> Check:
    found = facts["gpus"]
    if found["status"] != "ok":
        mend = "the lines above say why, if they fail; else try it: invoke exec nvidia-smi"
        says = found["detail"] or "nvidia-smi is not installed in the container"
        return failed(GPU, "count", says, mend)
    rows = found["rows"]
    names = sorted({str(row["name"]).removeprefix("NVIDIA ") for row in rows})
    says = f"{len(rows)} ({', '.join(names) or 'none'})"
    if wanted is None:
        return ok(GPU, "count", f"{says}; inventory.yaml names no count (gpus:)")
    if len(rows) == wanted:
        return ok(GPU, "count", f"{says}, as the inventory says")
    if len(rows) > wanted:
        return warning(
            GPU, "count", f"{says}, the inventory says {wanted}", "correct gpus: in inventory.yaml"
        )
    host = endpoint.host
    held = (look or {}).get("gpus") or []
    if held and len(held) < wanted:
        mend = f"one is lost: on {host}: dmesg | grep -i -e Xid -e NVRM, then reboot {host}"
        return failed(GPU, "count", f"{says} of {wanted}; the host itself has {len(held)}", mend)
    mend = f"pass the others through: on {host}: pct set {endpoint.vmid} -devN /dev/nvidiaN, "
    mend += then_reboot(facts, look, endpoint)
    return failed(GPU, "count", f"{says} of {wanted} of the inventory", mend)


def _ecc(rows: list[Json], endpoint: Endpoint) -> Check:
    mends = []
    if lost := [row for row in rows if _beyond_repair(row)]:
        cards = gpu_words.indices(lost)
        mends.append(f"have GPU {cards} replaced; until then leave it out: topology.devices in the recipe")
    if ill := [row for row in rows if _mendable(row)]:
        reset = f"nvidia-smi --gpu-reset -i {gpu_words.indices(ill)}"
        mends.append(f"invoke abort; then on {endpoint.host}: {reset}, or reboot it")
    if mends:
        says = "; ".join([*_by_ill(rows, _beyond_repair), *_by_ill(rows, _mendable)])
        return failed(GPU, "ecc", says, "; ".join(mends))
    if all(row["ecc_uncorrectable"] is None for row in rows):
        return ok(GPU, "ecc", "not counted on these cards")
    return ok(GPU, "ecc", "no uncorrectable error since the driver was loaded")


def _by_ill(rows: list[Json], ills: Callable[[Json], list[str]]) -> list[str]:
    """`GPU 2,5: asks for a reset` for each of the ills."""
    found: dict[str, list[Json]] = {}
    for row in rows:
        for ill in ills(row):
            found.setdefault(ill, []).append(row)
    return [f"GPU {gpu_words.indices(having)}: {ill}" for ill, having in found.items()]


def _beyond_repair(row: Json) -> list[str]:
    return [_BEYOND_REPAIR[part] for part in row["beyond_repair"]]


def _mendable(row: Json) -> list[str]:
    """What a reset may mend."""
    ills = ["uncorrectable errors"] if row["ecc_uncorrectable"] else []
    ills += [_REPAIRS[part] for part in row["repairs_pending"]]
    return [*ills, "asks for a reset"] if row["recovery"] not in (None, "None") else ills


def _xid(look: Json | None, endpoint: Endpoint) -> Check:
    """Errors that the driver wrote into the host's kernel log since the host's start."""
    if look is None or not look["dmesg"]:
        why = "the host was not asked" if look is None else "this login may not read the host's kernel log"
        return skipped(GPU, ["xid"], why)[0]
    seen = [match for line in look["xids"] if (match := _XID.match(line))]
    if not seen:
        return ok(GPU, "xid", "none in the host's kernel log")
    up = look["uptime_s"] or 0.0
    recent = [match for match in seen if up - float(match[1]) < DAY_S]
    grave = [match for match in recent if int(match[3]) in gpu_words.GRAVE_XIDS]
    last = (grave or recent or seen)[-1]
    meaning = gpu_words.xid(int(last[3]))
    says = f"Xid {last[3]} of {last[2]} {words.age(up - float(last[1]))} ago: {meaning}"
    if grave:
        mend = f"on {endpoint.host}: dmesg | grep Xid; reset the card, or reboot {endpoint.host}"
        return failed(GPU, "xid", says, mend)
    if recent:
        return warning(GPU, "xid", says, "invoke logs, if a run crashed then")
    return ok(GPU, "xid", f"none for a day; the last: {says}")


def _throttle(rows: list[Json]) -> Check:
    slowed = gpu_words.slowed(rows)
    if slowed:
        mend = "look at fans, room and power supplies; all GPUs wait for the slowest"
        return warning(GPU, "throttle", gpu_words.slowdown(slowed), mend)
    capped = [row for row in rows if "sw_power_cap" in row["throttle"]]
    if capped:
        return ok(GPU, "throttle", f"GPU {gpu_words.indices(capped)} at the power limit, as under full load")
    return ok(GPU, "throttle", "none slowed down")


def _memory(facts: Json, endpoint: Endpoint) -> Check:
    rows, alive = facts["gpus"]["rows"], facts["alive"]
    if alive:
        return ok(GPU, "memory", f"in use by {', '.join(run['id'] for run in alive)}")
    held = [row for row in rows if (row["memory_used_mib"] or 0) > BUSY_MIB]
    working = [row for row in rows if _works(row)]
    if not held and not working:
        return ok(GPU, "memory", f"free on {words.plural(len(rows), 'GPU')}; no run is alive")
    kinds = []
    if held:
        most = max(row["memory_used_mib"] for row in held) * 2**20
        kinds.append(f"GPU {gpu_words.indices(held)}: up to {words.size(most)} in use")
    if working:
        most = max(row["utilization_pct"] for row in working)
        kinds.append(f"GPU {gpu_words.indices(working)}: at work up to {most:.0f} % of the time")
    says = f"{'; '.join(kinds)}, though no run is alive"
    if facts["stale"] and working:
        pids = ", ".join(str(each["pid"]) for each in facts["stale"])
        mend = f"somebody needs it: ask whose pid {pids} is (invoke status, stale), or wait for its end"
        return warning(GPU, "memory", says, mend)
    if facts["stale"]:
        return warning(GPU, "memory", says, _kill(facts["stale"]))
    mend = f"nobody in this container holds it: on {endpoint.host}: fuser -v /dev/nvidia*"
    return warning(GPU, "memory", says, mend)


def _works(row: Json) -> bool:
    used = row["memory_used_mib"]
    return (row["utilization_pct"] or 0) >= WORKING_PCT and (used is None or used >= CONTEXT_MIB)


def _stale(stale: list[Json]) -> Check:
    if not stale:
        return ok(GPU, "stale", "no process outside a run holds a GPU")
    first = stale[0]
    more = f", and {len(stale) - 1} more" if len(stale) > 1 else ""
    says = f"pid {first['pid']} holds a GPU ({first['command'][:60]}){more}"
    return warning(GPU, "stale", says, _kill(stale))


def _kill(stale: list[Json]) -> str:
    pids = " ".join(str(each["pid"]) for each in stale)
    return f"if nobody needs it any more: invoke exec 'kill {pids}'"


def code(facts: Json) -> Iterator[Check]:
    """Whether the software would use the GPUs as it should."""
    yield _cuda(facts)
    yield _kernels(facts)
    yield _tracing(facts)


def _cuda(facts: Json) -> Check:
    python, found = facts["python"], facts["gpus"]
    if python["error"] or not python["versions"].get("torch"):
        return skipped(CODE, ["cuda"], "there is no torch to look at")[0]
    torch, cuda = python["versions"]["torch"], python["torch"]["cuda"]
    if found["status"] == "absent":
        return ok(CODE, "cuda", f"torch {torch}; there is no GPU that it would have to match")
    if cuda is None:
        mend = "invoke env.build --name cu130, or a CUDA build of torch in the interpreter of your own"
        return failed(CODE, "cuda", f"torch {torch} is built for the CPU alone", mend)
    newest = found["cuda"]
    if newest is None:
        return skipped(CODE, ["cuda"], "nvidia-smi does not answer")[0]
    if int(cuda.partition(".")[0]) > int(newest.partition(".")[0]):
        mend = f"a newer driver on the host, or a torch for CUDA {newest}"
        return failed(CODE, "cuda", f"torch is built for CUDA {cuda}, the driver runs up to {newest}", mend)
    return ok(CODE, "cuda", f"torch is built for {cuda}, the driver runs up to {newest}")


def _kernels(facts: Json) -> Check:
    kernels = facts["kernels"]
    slow = [line for run in facts["alive"] for line in (run["kernels"] or {}).get("slow") or []]
    if slow:
        mend = "install what its log names, then invoke restart"
        return warning(
            CODE, "kernels", f"{facts['alive'][0]['id']} runs on reference kernels: {slow[0]}", mend
        )
    if "skipped" in kernels:
        return skipped(CODE, ["kernels"], kernels["skipped"])[0]
    if kernels["error"]:
        mend = kernels["hint"] or f"try it: invoke exec '{facts['python']['path']} -m trainer.kernels …'"
        return failed(CODE, "kernels", kernels["error"], mend)
    lines = [line for report in kernels["reports"] for line in report["lines"]]
    behind = [line for line in lines if not line["fast"]]
    if behind:
        says = "; ".join(
            dict.fromkeys(f"{line['role']}: {line['why'] or 'reference only'}" for line in behind)
        )
        mend = "; ".join(dict.fromkeys(line["mend"] for line in behind if line["mend"]))
        # an interpreter without pip, as env.build makes them, is mended from here: by its lock
        where = "in the container: " if "-m pip " in mend else ""
        return failed(CODE, "kernels", f"slow: {says}", where + mend)
    shown = ", ".join(dict.fromkeys(f"{line['role']}{_gain(line)}" for line in lines))
    unused = "".join(f"; {why}" for why in dict.fromkeys(line["why"] for line in lines) if why)
    return ok(CODE, "kernels", f"fast: {shown}; proven in {words.duration(kernels['seconds'])}{unused}")


def _gain(line: Json) -> str:
    fast, reference = line["milliseconds"], line["reference_milliseconds"]
    return f" {reference / fast:.1f}x" if fast and reference else ""


def _tracing(facts: Json) -> Check:
    """torch before 2.14 keeps one tracing flag for all threads; the payload makes it a thread's own."""
    python = facts["python"]
    torch = None if python["error"] else python["versions"].get("torch")
    numbers = re.match(r"(\d+)\.(\d+)", torch or "")
    if numbers is None:
        return skipped(CODE, ["tracing"], "there is no torch to look at")[0]
    if facts["release"]["current"] is None:
        return skipped(CODE, ["tracing"], "there is no release")[0]
    if (int(numbers[1]), int(numbers[2])) >= _FIRST_NATIVE:
        return ok(CODE, "tracing", f"native: the flag is a thread's own (torch {torch})")
    if not facts["release"]["patches_fx"]:
        says = f"torch {torch} shares the flag, and the release has no trainer/fx_threads.py"
        return failed(CODE, "tracing", says, "invoke deploy: a release since 0.1.0 has it")
    return ok(CODE, "tracing", f"patched by the release: torch shares the flag (torch {torch})")
