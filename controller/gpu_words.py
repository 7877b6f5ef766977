"""What a driver's numbers and names mean to a person, for `doctor` and for the verdict alike."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

# NVIDIA's own numbers: those that speak of hardware or of the driver, and common ones of programs.
GRAVE_XIDS = {
    48: "an uncorrectable memory error",
    64: "a memory row could not be replaced",
    74: "NVLink failed",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
}
XIDS = {
    **GRAVE_XIDS,
    13: "a program's kernel failed",
    31: "a program read or wrote where it must not",
    43: "a program was stopped for an error of its own",
    45: "a program ended while its work was on the GPU",
    63: "a memory row was replaced",
    94: "a memory error that cost one program",
}
SLOWDOWNS = {
    "hw_thermal_slowdown": "too hot",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "the power supply asks for less",
    "hw_slowdown": "too hot or short of power",
}


def xid(number: int) -> str:
    return XIDS.get(number, "NVIDIA's list of Xid errors explains it")


def slowed(rows: list[Json]) -> list[Json]:
    """The GPUs whose clock is held down; a power limit that is reached under full load is none of these."""
    return [row for row in rows if set(row.get("throttle") or ()) & SLOWDOWNS.keys()]


def slowdown(rows: list[Json]) -> str:
    """`GPU 3,5 slowed down: too hot, up to 88 C` of rows that `slowed` gave."""
    told = {reason for row in rows for reason in row["throttle"]} & SLOWDOWNS.keys()
    causes = sorted({SLOWDOWNS[reason] for reason in told - {"hw_slowdown"} or told})
    heats = [row["temperature_c"] for row in rows if row.get("temperature_c") is not None]
    heat = f", up to {max(heats):.0f} C" if heats else ""
    return f"GPU {indices(rows)} slowed down: {' and '.join(causes)}{heat}"


def indices(rows: list[Json]) -> str:
    return ",".join(str(row["index"]) for row in rows)
