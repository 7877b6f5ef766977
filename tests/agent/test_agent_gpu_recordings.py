"""What the agent makes of a real card: one H200's recorded answers, idle and under load, played back."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agent import gpu, gpu_health
from controller import gpu_words
from tests.agent.conftest import Box
from tests.agent.recorded_card import (
    CUDA,
    DRIVER,
    LACKS,
    LONG_ROWS,
    PATIENT_S,
    RECORDING,
    ROWS,
    STATES,
    Player,
    installed,
    judged,
    said,
)
from tests.record_nvidia_smi import DEVICE_FILES, FORMS, blanked


@pytest.fixture
def player(box: Box, monkeypatch: pytest.MonkeyPatch) -> Player:
    return installed(box, monkeypatch)


# -- the recording itself ------------------------------------------------------------------------------------


def test_the_recording_is_what_the_recorder_asks_and_names_nobody() -> None:
    for state in STATES:
        assert list(RECORDING[state]) == [" ".join(argv) for argv in FORMS]
        for argv, told in RECORDING[state].items():
            assert told["code"] == 0, argv
            assert blanked(told["text"]) == told["text"], argv


def test_what_tells_one_card_machine_or_person_from_another_is_blanked() -> None:
    private = """\
    <serial>1652823054321</serial> <uuid>GPU-325bf28b-e1e1-0628-3678-06673bdb76fd</uuid>
    <chassis_serial_number>AB12C</chassis_serial_number> <pdi>0x8fd1c6a1b2</pdi>
    <clusterUuid>7b1c2d3e-0a1b-4c5d-8e9f-001122334455</clusterUuid>
    <gpu_fabric_guid>0xfeedbeef01</gpu_fabric_guid> <board_part_number>692-2G520-0282-000</board_part_number>
    Serial Number                          : 1652823054321
    GPU PDI                                : 0x8fd1c6a1b2
    Chassis Serial Number                  : AB12C
    GPU Fabric GUID                        : 0xfeedbeef01
    MIG 1g.18gb Device  0: (UUID: MIG-325bf28b-e1e1-0628-3678-06673bdb76fd)
    NVRM version: NVIDIA UNIX Open Kernel Module  580.1  Release Build  (dvs-builder@U22-I3-AF05-08-5)
    470, /home/ana/venv/bin/python, 874"""
    found = blanked(private)
    secret = "1652823054321 325bf28b 0x8fd1c6a1b2 AB12C 7b1c2d3e 0xfeedbeef01 692-2G520 dvs-builder ana/"
    assert [word for word in secret.split() if word in found] == []
    kept = "<serial>0</serial>", "Chassis Serial Number                  : 0", "580.1  Release Build", ", 874"
    assert all(text in found for text in kept), found
    assert blanked("<serial>N/A</serial>\n\t<uuid>") == "<serial>N/A</serial>\n\t<uuid>"


# -- the short form, which every look asks for ---------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dialect", range(len(gpu._DIALECTS)))
def test_every_dialect_tells_the_card_as_it_was(player: Player, state: str, dialect: int) -> None:
    player.play(state, lacks=LACKS[dialect])
    expected = dict(ROWS[state])
    expected["power_w"] = float(said(state, gpu.table(dialect)).split(", ")[7])  # each asked a moment later
    assert abs(expected["power_w"] - ROWS[state]["power_w"]) < 1.0
    if dialect == 2:
        expected.update(throttle=None, ecc_uncorrectable=None)  # not asked for: unknown, not well
    assert player.row() == expected
    assert [argv for _, argv in player.asked()] == [" ".join(gpu.table(n)) for n in range(dialect + 1)]


@pytest.mark.parametrize("state", STATES)
def test_a_look_has_the_card_and_neither_idleness_nor_full_load_is_a_slow_clock(
    box: Box, player: Player, state: str
) -> None:
    player.play(state)
    found = box.call("snapshot", gpu_deadline_s=PATIENT_S).result["gpus"]
    assert found == {"status": "ok", "detail": "", "rows": [ROWS[state]]}
    assert gpu_words.slowed(found["rows"]) == []
    player.play(state, edit=lambda text: re.sub(r"0x0{15}\d", "0x0000000000000064", text))
    hot = box.call("snapshot", gpu_deadline_s=PATIENT_S).result["gpus"]["rows"]
    assert hot[0]["throttle"] == ["sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown"]
    assert gpu_words.slowdown(gpu_words.slowed(hot)).startswith("GPU 0 slowed down: too hot")


# -- the long form, which `doctor` asks for ------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_doctor_reads_every_fact_and_calls_none_a_fault(box: Box, player: Player, state: str) -> None:
    player.play(state)
    facts = box.call("doctor", python=box.python, prove=False, gpu_deadline_s=PATIENT_S).result
    found = facts["gpus"]
    assert found == {"status": "ok", "detail": "", "driver": DRIVER, "cuda": CUDA, "rows": [LONG_ROWS[state]]}
    opinion = judged(facts)
    assert [opinion[name].state for name in ("count", "ecc", "throttle")] == ["ok"] * 3
    load = {"idle": "none slowed down", "busy": "GPU 0 at the power limit, as under full load"}
    assert opinion["throttle"].says == load[state]


RESET = "invoke abort; then on pve1.example.org: nvidia-smi --gpu-reset -i 0, or reboot it"
REPLACE = "have GPU 0 replaced; until then leave it out: topology.devices in the recipe"


@pytest.mark.parametrize(
    ("element", "fact", "part", "says", "mend"),
    [
        ("remapped_row_pending", "repairs_pending", "row", "a memory row waits to be replaced", RESET),
        (
            "channel_repair_pending",
            "repairs_pending",
            "channel",
            "a memory channel waits for its repair",
            RESET,
        ),
        ("tpc_repair_pending", "repairs_pending", "tpc", "a group of compute units (TPC) waits", RESET),
        ("remapped_row_failure", "beyond_repair", "row", "a memory row could not be replaced", REPLACE),
        ("unrepairable_memory", "beyond_repair", "memory", "memory that cannot be repaired", REPLACE),
        (
            "sram_threshold_exceeded",
            "beyond_repair",
            "sram",
            "errors of the on-chip memory (SRAM)",
            REPLACE,
        ),
    ],
)
def test_each_flag_of_damage_is_read_and_told_in_its_own_words(
    player: Player, element: str, fact: str, part: str, says: str, mend: str
) -> None:
    player.play("idle", edit=lambda text: text.replace(f"<{element}>No<", f"<{element}>Yes<"))
    found = player.health()
    assert found["rows"] == [{**LONG_ROWS["idle"], fact: [part]}]
    facts = {"gpus": found, "nodes": [], "driver": {"kernel": None, "userland": []}, "alive": [], "stale": []}
    told = judged(facts)["ecc"]
    assert (told.state, told.mend) == ("failed", mend) and told.says.startswith(f"GPU 0: {says}")
    assert ("row" in told.says) == (part == "row"), "only a row is called one"


def test_errors_of_this_boot_are_counted_and_those_of_the_cards_life_are_not(player: Player) -> None:
    """The same elements stand in both sections, the boot's first."""
    none, two = "<dram_uncorrectable>0<", "<dram_uncorrectable>2<"
    player.play("busy", edit=lambda text: text.replace(none, two, 1))
    assert player.health()["rows"][0]["ecc_uncorrectable"] == 2
    player.play("busy", edit=lambda text: two.join(text.rsplit(none, 1)))
    assert player.health()["rows"] == [LONG_ROWS["busy"]]


# -- what the forms say of one another -----------------------------------------------------------------------


def outline(text: str) -> dict[str, str]:
    """`-q` as `ECC Errors/Volatile/DRAM Uncorrectable` -> `0`: the card itself is not named."""
    found: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        name, colon, value = line.partition(" : ")
        path[(len(line) - len(line.lstrip())) // 4 :] = [name.strip()]
        if colon:
            found["/".join(path[1:] or path)] = value.strip()
    return found


def number(text: str) -> float:
    return float(text.split()[0])


@pytest.mark.parametrize("state", STATES)
def test_all_forms_agree_on_the_card(player: Player, state: str) -> None:
    player.play(state)
    short, health = player.row(), player.health()
    (long,) = health["rows"]
    text = outline(said(state, ["nvidia-smi", "-q"]))
    assert short["name"] == long["name"] == text["Product Name"]
    assert f"GPU 0: {short['name']} (UUID" in said(state, ["nvidia-smi", "-L"])
    assert short["memory_used_mib"] == long["memory_used_mib"] == number(text["FB Memory Usage/Used"])
    assert short["memory_total_mib"] == long["memory_total_mib"] == number(text["FB Memory Usage/Total"])
    assert short["power_limit_w"] == number(text["GPU Power Readings/Current Power Limit"])
    assert (long["ecc"], long["recovery"]) == (text["ECC Mode/Current"], text["GPU Recovery Action"])
    kind = re.compile("ECC Errors/Volatile/.* Uncorrectable")
    counted = [value for name, value in text.items() if kind.match(name)]
    assert len(counted) == 3
    assert short["ecc_uncorrectable"] == long["ecc_uncorrectable"] == sum(map(int, counted))
    active = [name for name, value in text.items() if name.startswith("Clocks Event") and value == "Active"]
    assert active == [
        {"idle": "Clocks Event Reasons/Idle", "busy": "Clocks Event Reasons/SW Power Cap"}[state]
    ]
    assert short["throttle"] == long["throttle"] == ROWS[state]["throttle"]
    # from here on what moves from one moment to the next
    plain = re.search(
        r"(\d+)C +P\d+ +(\d+)W / +(\d+)W \| +(\d+)MiB / (\d+)MiB \| +(\d+)%", said(state, ["nvidia-smi"])
    )
    assert plain is not None
    heat, power, limit, used, total, busy = map(float, plain.groups())
    still = ("power_limit_w", "memory_used_mib", "memory_total_mib")
    assert [limit, used, total] == [short[name] for name in still]
    for told in (heat, long["temperature_c"], number(text["Temperature/GPU Current Temp"])):
        assert told == pytest.approx(short["temperature_c"], abs=2)
    for told in (power, number(text["GPU Power Readings/Average Power Draw"])):
        assert told == pytest.approx(short["power_w"], rel=0.05)
    for told in (busy, number(text["Utilization/GPU"])):
        assert told == pytest.approx(short["utilization_pct"], abs=5)


def test_a_slow_clocks_reasons_have_one_name_in_both_forms(player: Player) -> None:
    """All that this driver's long form lists, at once."""

    def all_at_once(text: str) -> str:
        return re.sub(r"0x0{15}\d", "0x00000000000001ff", text).replace(">Not Active<", ">Active<")

    player.play("idle", edit=all_at_once)
    (long,) = player.health()["rows"]
    assert len(long["throttle"]) == 9
    assert sorted(player.row()["throttle"]) == sorted(long["throttle"])


@pytest.mark.parametrize("state", STATES)
def test_kernel_userland_and_nvidia_smi_are_of_one_version(
    player: Player, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.play(state)
    health = player.health()
    versions = outline(said(state, ["nvidia-smi", "--version"]))
    assert (versions["DRIVER version"], versions["CUDA Version"]) == (health["driver"], health["cuda"])
    assert versions["NVML version"] != DRIVER, "cut to two numbers: nothing to hold against the kernel's"
    kernel = re.search(r"Kernel Module.*?  ([\d.]+)  ", said(state, ["cat", "/proc/driver/nvidia/version"]))
    assert kernel is not None and kernel[1] == health["driver"] == player.row()["driver"] == DRIVER
    for name in ("libcuda.so", "libcuda.so.1", f"libcuda.so.{kernel[1]}"):
        (tmp_path / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert kernel[1] in gpu_health.userland() and "1" not in gpu_health.userland()


def test_of_the_device_files_those_count_that_a_program_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [line.split()[-1] for line in said("idle", DEVICE_FILES).splitlines()]
    assert {"nvidia-caps", "nvidia-uvm-tools"} < set(listed)
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda folder: listed)
        found = gpu_health.nodes()
    assert found == ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"]
