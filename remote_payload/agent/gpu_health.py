"""What makes a GPU that is there slow or untrustworthy stands only in `nvidia-smi`'s long form, as XML.

Elements have been renamed over the years: `clocks_throttle_reasons` became `clocks_event_reasons` with 535,
one count of uncorrectable errors became several. What a driver does not give is null.
"""

from __future__ import annotations

import os
import re
from typing import Any
from xml.etree import ElementTree

from agent import gpu

LONG = ("nvidia-smi", "-q", "-x")
NODES = ("nvidiactl", "nvidia-uvm")  # beside one nvidiaN a GPU
# What waits for a reset to be mended. Bad memory is put out of use by the row since Ampere, by the page
# before it; new drivers know channels, and compute units (TPC), too.
_REPAIRS = {
    "row": "remapped_rows/remapped_row_pending",
    "page": "retired_pages/pending_retirement",
    "channel": "ecc_errors/channel_repair_pending",
    "tpc": "ecc_errors/tpc_repair_pending",
}
# What no reset mends: each is a ground on which NVIDIA takes a card back, after a diagnosis of its own.
_BEYOND_REPAIR = {
    "row": "remapped_rows/remapped_row_failure",
    "memory": "ecc_errors/unrepairable_memory",
    "sram": "ecc_errors/aggregate/sram_threshold_exceeded",
}
_GPU_NODE = re.compile(r"nvidia\d+")
_USERLAND = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
)
# Opened in a child: in a driver that is unwell an open may never return. The device files' own permissions
# say nothing, because the container's cgroup has the last word.
_OPEN_ALL = 'for node; do if ( : <>"$node" ) 2>/dev/null; then echo yes; else echo no; fi; done'


def ask_long(run_root: str, deadline_s: float) -> gpu.Query:
    return gpu.ask(run_root, deadline_s, LONG)


def answer_long(query: gpu.Query) -> dict[str, Any]:
    """`{status, detail, driver, cuda, rows[]}`; `cuda` is the newest CUDA that the driver runs."""
    said = gpu.reply(query)
    facts: dict[str, Any] = {"status": said.status, "detail": said.detail}
    facts.update({"driver": None, "cuda": None, "rows": []})
    if said.status != "ok":
        return facts
    try:
        log = ElementTree.fromstring(said.text[said.text.index("<nvidia_smi_log") :])
    except (ValueError, ElementTree.ParseError) as error:
        return {**facts, "status": "error", "detail": f"nvidia-smi -q -x is not XML: {error}"}
    facts["driver"], facts["cuda"] = _text(log, "driver_version"), _text(log, "cuda_version")
    facts["rows"] = [_row(index, node, facts["driver"]) for index, node in enumerate(log.findall("gpu"))]
    return facts


def _row(index: int, node: ElementTree.Element, driver: str | None) -> dict[str, Any]:
    reasons = node.find("clocks_event_reasons")
    if reasons is None:
        reasons = node.find("clocks_throttle_reasons")
    active = [each.tag for each in (reasons if reasons is not None else ()) if each.text == "Active"]
    return {
        "index": index,
        "name": _text(node, "product_name"),
        "driver": driver,
        "bus": node.get("id"),
        "memory_used_mib": _number(node, "fb_memory_usage/used"),
        "memory_total_mib": _number(node, "fb_memory_usage/total"),
        "utilization_pct": _number(node, "utilization/gpu_util"),
        "ecc": _text(node, "ecc_mode/current_ecc"),
        "ecc_uncorrectable": _uncorrectable(node.find("ecc_errors/volatile")),
        "repairs_pending": [part for part, path in _REPAIRS.items() if _text(node, path) == "Yes"],
        "beyond_repair": [part for part, path in _BEYOND_REPAIR.items() if _text(node, path) == "Yes"],
        "recovery": _text(node, "gpu_recovery_action"),
        "throttle": [tag.partition("_reason_")[2] for tag in active],
        "temperature_c": _number(node, "temperature/gpu_temp"),
    }


def _uncorrectable(errors: ElementTree.Element | None) -> int | None:
    """Of all kinds since the driver was loaded; None where nothing is counted."""
    if errors is None:
        return None
    counted = [each for each in errors.iter() if "uncorrectable" in each.tag or each.tag == "double_bit"]
    found = [int(text) for each in counted for text in [_value(each)] if text and text.isdigit()]
    return sum(found) if found else None


def _value(node: ElementTree.Element) -> str | None:
    """Its own text, or that of its `total` where it has parts, as drivers before 418 have."""
    return _text(node, "total") if len(node) else node.text


def _text(node: ElementTree.Element, path: str) -> str | None:
    text = (node.findtext(path) or "").strip()
    return None if text in ("", "N/A", "[N/A]") else text


def _number(node: ElementTree.Element, path: str) -> float | None:
    """The number of `143771 MiB` or `41 C`."""
    try:
        return float((_text(node, path) or "").split()[0])
    except (ValueError, IndexError):
        return None


def nodes() -> list[str]:
    """The NVIDIA device files of this container, capabilities of MIG left out."""
    try:
        names = sorted(os.listdir("/dev"))
    except OSError:
        return []
    return [f"/dev/{name}" for name in names if name in NODES or _GPU_NODE.fullmatch(name)]


def ask_nodes(run_root: str, deadline_s: float, paths: list[str]) -> gpu.Query:
    return gpu.ask(run_root, deadline_s, ("sh", "-c", _OPEN_ALL, "sh", *paths))


def answer_nodes(query: gpu.Query, paths: list[str]) -> list[dict[str, Any]]:
    """`{path, opens}`; `opens` is null where the driver did not answer in time."""
    said = gpu.reply(query).text.split()
    told = [word == "yes" for word in said] if len(said) == len(paths) else [None] * len(paths)
    return [{"path": path, "opens": opens} for path, opens in zip(paths, told)]  # noqa: B905 - 3.10


def kernel_driver() -> str | None:
    """The version of the module in the host's kernel, which every container shares."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def userland() -> list[str]:
    """The versions of `libcuda.so` in this container; more than one is a mixed installation."""
    found: set[str] = set()
    for folder in (*_USERLAND, *os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        try:
            names = os.listdir(folder) if folder else []
        except OSError:
            continue
        versions = (name[len("libcuda.so.") :] for name in names if name.startswith("libcuda.so."))
        found.update(version for version in versions if "." in version)  # libcuda.so.1 is the link
    return sorted(found)
