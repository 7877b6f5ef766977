"""The facts of `doctor`: from a real call of the agent, with a program in nvidia-smi's place."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from agent import gpu, gpu_health

XML = (Path(__file__).resolve().parents[1] / "golden/nvidia-smi/two-h200.xml").read_text()
TABLE = [
    f"{n}, NVIDIA H200, 580.159.03, 0, 143771, 0, 33, 75.00, 700.00" for n in range(2)
]  # the short form, which a start asks for
BOTH_FORMS = """case "$1" in -q) cat "$(dirname "$0")/long.xml";; *) cat "$(dirname "$0")/table";; esac"""
LINE = {"role": "attention", "function": "f", "fast": True, "milliseconds": 1.0, "why": "", "mend": ""}


@pytest.fixture
def smi(box):
    """Puts a script in nvidia-smi's place."""

    def install(script):
        folder = box.base / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "long.xml").write_text(XML)
        (folder / "table").write_text("\n".join(TABLE))
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
        box.environment["PATH"] = f"{folder}:{box.environment['PATH']}"

    return install


def doctor(box, **args):
    return box.call("doctor", recipe="tiny", python=box.python, **args).result


def health(text):
    query = gpu.Query("/nowhere", 1.0, gpu_health.LONG)
    query.known = gpu.Reply("ok", "", text)
    return gpu_health.answer_long(query)


def test_the_long_form_gives_health_and_leaves_out_what_is_normal():
    found = health(XML)
    assert (found["status"], found["driver"], found["cuda"]) == ("ok", "580.159.03", "13.0")
    well, sick = found["rows"]
    assert well["name"] == "NVIDIA H200" and well["bus"] == "00000000:1B:00.0"
    assert (well["memory_used_mib"], well["memory_total_mib"], well["temperature_c"]) == (0.0, 143771.0, 33.0)
    assert (well["ecc"], well["ecc_uncorrectable"], well["repairs_pending"]) == ("Enabled", 0, [])
    assert (well["throttle"], well["recovery"], well["beyond_repair"]) == (["gpu_idle"], "None", [])
    assert sick["ecc_uncorrectable"] == 3, "those of this boot, of all kinds, and not the card's whole life"
    assert (sick["repairs_pending"], sick["recovery"]) == (["row"], "Reset")
    assert sick["throttle"] == ["sw_power_cap", "sw_thermal_slowdown"]


def test_an_old_driver_and_a_card_without_ecc_are_read_too():
    old = """<nvidia_smi_log><driver_version>470.1</driver_version><gpu id="0000:01:00.0">
      <product_name>Tesla V100</product_name>
      <clocks_throttle_reasons><clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
      </clocks_throttle_reasons><ecc_errors><volatile><single_bit><total>8</total></single_bit>
      <double_bit><device_memory>2</device_memory><total>2</total></double_bit></volatile></ecc_errors>
      <retired_pages><pending_retirement>Yes</pending_retirement></retired_pages></gpu>
      <gpu id="0000:02:00.0"><product_name>GeForce</product_name><fb_memory_usage><used>[N/A]</used>
      </fb_memory_usage><ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>
      </gpu></nvidia_smi_log>"""
    found = health(old)
    assert found["cuda"] is None
    tesla, geforce = found["rows"]
    assert (tesla["throttle"], tesla["ecc_uncorrectable"], tesla["repairs_pending"]) == (
        ["hw_slowdown"],
        2,
        ["page"],
    )
    assert (geforce["ecc_uncorrectable"], geforce["memory_used_mib"], geforce["throttle"]) == (None, None, [])


@pytest.mark.parametrize("text", ["", "<nvidia_smi_log><gpu>", "Unable to determine the device handle"])
def test_what_is_not_xml_is_an_error_and_no_crash(text):
    found = health(text)
    assert found["status"] == "error" and "not XML" in found["detail"] and found["rows"] == []


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_a_container_without_a_gpu_and_without_a_release_gives_every_fact(box):
    facts = doctor(box)
    assert facts["gpus"]["status"] == "absent" and facts["nodes"] == [] and facts["stale"] == []
    assert facts["release"] == {"current": None, "patches_fx": False}
    assert facts["recipe"] == {"error": "there is no release to read it with", "hint": "invoke deploy"}
    assert facts["kernels"] == {"skipped": "there is no GPU to prove them on"}
    assert facts["tmux"]["path"] and facts["tmux"]["version"][0].isdigit()
    assert facts["python"]["versions"]["python"] == "{}.{}.{}".format(*sys.version_info)
    assert facts["shm"]["total_bytes"] > 0 and facts["disks"][0]["inodes_free"] >= 0


def test_a_wrong_interpreter_and_a_wrong_recipe_hide_nothing_else(ready):
    facts = ready.call("doctor", recipe="none", python="/no/such/python").result
    assert "/no/such/python" in facts["python"]["error"] and facts["python"]["hint"]
    assert "/no/such/python" in facts["recipe"]["error"]
    assert facts["release"]["current"] == ready.current() and facts["caches"]["current"] is None
    facts = ready.call("doctor", recipe="none", python=ready.python).result
    assert facts["python"]["error"] is None and facts["recipe"]["error"]


def test_the_proof_runs_in_the_release_with_the_cache_of_the_next_start(ready, smi):
    smi(BOTH_FORMS)
    proof = {"ok": True, "reports": [{"device": "cuda:0", "fast": True, "lines": [LINE]}]}
    overrides = {"behave": "train", "proof": proof}
    answer = ready.call("doctor", recipe="tiny", overrides=overrides, python=ready.python)
    facts = answer.result
    assert facts["kernels"]["reports"] == proof["reports"] and facts["kernels"]["error"] is None
    assert facts["kernels"]["seconds"] > 0
    assert "proving the kernels" in answer.notes[0]["text"]
    assert facts["gpus"]["rows"][1]["ecc_uncorrectable"] == 3
    started = ready.start(recipe={"proof": proof}).result
    assert facts["caches"]["current"] == started["cache"]["key"], "the same key as the start's"
    alive = doctor(ready)
    assert [run["id"] for run in alive["alive"]] == ["r-0001"]
    assert "r-0001 is using the GPUs" in alive["kernels"]["skipped"]
    assert [row["key"] for row in alive["caches"]["rows"]] == [started["cache"]["key"]]


@pytest.mark.parametrize(
    ("proof", "code", "expected"),
    [
        ({"ok": False, "error": "it is full"}, 3, {"error": None, "hint": "", "skipped": "it is full"}),
        ({"ok": False, "error": "no such model"}, 2, {"error": "no such model", "hint": ""}),
        ("dies", 1, {"error": "RuntimeError: no CUDA device is usable", "hint": ""}),
    ],
)
def test_a_proof_that_fails_says_why(ready, smi, proof, code, expected):
    smi(BOTH_FORMS)
    assert doctor(ready, overrides={"proof": proof, "proof_code": code})["kernels"] == expected
    assert doctor(ready, prove=False)["kernels"] == {"skipped": "not asked for"}


def test_a_driver_that_hangs_costs_its_deadline_and_no_proof_and_the_other_facts_are_there(ready, smi):
    smi("exec sleep 60")
    proof = {"ok": True, "reports": [{"device": "cuda:0", "fast": True, "lines": [LINE]}]}
    began = time.monotonic()
    facts = doctor(ready, overrides={"proof": proof}, gpu_deadline_s=0.5)
    assert time.monotonic() - began < 45
    assert facts["gpus"]["status"] == "timeout" and facts["tmux"]["path"]
    assert facts["recipe"]["error"] is None and facts["python"]["error"] is None
    why = "nvidia-smi does not answer, and the proof would hang as it does"
    assert facts["kernels"] == {"skipped": why}, "a proof has minutes"


def test_device_files_are_opened_and_not_only_looked_at(box):
    Path(box.roots["run"]).mkdir()
    shut = box.base / "shut"
    shut.mkdir()  # opening a folder for writing fails for root too
    paths = [os.devnull, str(shut), str(box.base / "missing")]
    found = gpu_health.answer_nodes(gpu_health.ask_nodes(box.roots["run"], 10.0, paths), paths)
    assert [row["opens"] for row in found[:2]] == [True, False]


def test_nothing_is_changed(ready):
    def seen():
        return sorted(str(path) for path in ready.base.rglob("*") if "home" not in path.parts)

    before = seen()
    doctor(ready)
    assert seen() == before
