"""What a verdict goes by besides the run's files: GPUs, the kernel's log, the log's growth, the baseline."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from agent import baseline, gpu, kernel_log, logtimes

# One H200 under load, driver 580.159.04, as its nvidia-smi told each field; power.limit from the long form.
RECORDED = {
    "index": "0",
    "name": "NVIDIA H200",
    "driver_version": "580.159.04",
    "memory.used": "21363",
    "memory.total": "143771",
    "utilization.gpu": "100",
    "temperature.gpu": "53",
    "power.draw": "236.72",
    "power.limit": "700.00",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.active": "0x0000000000000004",
}
DRIVER = """#!/usr/bin/env python3
import json, sys
told = json.loads({told!r})
names = next(each for each in sys.argv if each.startswith("--query-gpu=")).split("=")[1].split(",")
for name in names:
    if name not in told:
        print(f'Field "{{name}}" is not a valid field to query.\\n')
        sys.exit(2)
print(", ".join(told[name] for name in names))
"""


def driver(box, told):
    """An nvidia-smi that knows exactly these fields, and refuses an unknown one in the real one's words."""
    folder = box.base / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(DRIVER.format(told=json.dumps(told)))
    (folder / "nvidia-smi").chmod(0o755)
    if not box.environment["PATH"].startswith(str(folder)):
        box.environment["PATH"] = f"{folder}:{box.environment['PATH']}"


@pytest.mark.parametrize("name", ["clocks_throttle_reasons.active", "clocks_event_reasons.active", None])
def test_each_driver_is_asked_in_words_that_it_knows(box, name):
    health = ("ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")
    told = {key: value for key, value in RECORDED.items() if key not in health}
    if name is not None:
        told |= {health[0]: "0", name: RECORDED[health[1]]}
    driver(box, told)
    gpus = box.call("snapshot").result["gpus"]
    assert gpus["status"] == "ok", gpus
    (row,) = gpus["rows"]
    assert (row["name"], row["driver"], row["memory_used_mib"]) == ("NVIDIA H200", "580.159.04", 21363)
    expected = (["sw_power_cap"], 0) if name is not None else (None, None)
    assert (row["throttle"], row["ecc_uncorrectable"]) == expected


def test_reasons_of_a_slow_clock_have_the_names_of_the_long_form(box):
    driver(box, {**RECORDED, "clocks_throttle_reasons.active": "0x0000000000000068"})
    (row,) = box.call("snapshot").result["gpus"]["rows"]
    assert row["throttle"] == ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown"]


def test_a_lost_gpu_is_named_by_the_drivers_word(box):
    lost = dict.fromkeys(RECORDED, "[GPU is lost]") | {"index": "3", "name": "NVIDIA H200"}
    driver(box, lost)
    (row,) = box.call("snapshot").result["gpus"]["rows"]
    assert row["fault"] == "GPU is lost" and row["index"] == 3 and row["memory_used_mib"] is None
    for told, fault in (
        ("0, X, 5, [N/A], 9, 0, 3, [N/A], 1", None),
        ("0, X, 5, 7, 9, 0, 3, [Unknown Error], 1", None),
        ("0, X, 5, [Unknown Error], [Unknown Error], [N/A], [N/A], [N/A], 1", "Unknown Error"),
    ):
        assert gpu._row(told, gpu._PLAIN)["fault"] == fault, told


KERNEL = """\
<6>[  100.000001] nvidia-nvlink: Nvlink Core is being initialized, major device number 236
<4>[ 5000.250000] NVRM: Xid (PCI:0000:43:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
<4>[ 5000.250100] NVRM: GPU 0000:43:00.0: GPU has fallen off the bus.
<4>[ 6000.000000] NVRM: Xid (PCI:0000:1b:00): 31, pid=909, name=python3, Ch 00000008, intr 00000000. MMU Fault
"""


def test_xids_of_the_kernels_log_have_the_time_of_the_container():
    first, second = kernel_log.parse(KERNEL, booted=1_000_000.0)
    assert (first["at"], first["bus"], first["number"]) == (1_005_000.25, "0000:43:00", 79)
    assert first["text"].endswith("GPU has fallen off the bus.")
    assert second["number"] == 31


def test_a_log_that_may_not_be_read_is_told_from_one_without_errors(box):
    found = box.call("snapshot").result["xids"]
    assert found is None or isinstance(found, list)
    assert kernel_log.parse("", 0.0) == []


def test_growth_looks_back_five_minutes(tmp_path):
    notes = [(1000.0 + 5 * n, 1000 * n) for n in range(200)]
    (tmp_path / logtimes.NAME).write_text("".join(f"{at:.1f} {size}\n" for at, size in notes) + "19")
    now = notes[-1][0] + 2
    grown = logtimes.growth(str(tmp_path), now)
    assert grown == {"bytes": 59_000, "seconds": 297.0}
    assert logtimes.growth(str(tmp_path), now + 1000) is None, "it has not grown for long"
    assert logtimes.growth(str(tmp_path / "none"), now) is None


KIND = {
    "config_hash": "c0ffee",
    "gpus": {"names": {"NVIDIA H200": 8}, "driver": "580.159.04"},
    "versions": {"torch": "2.11.0"},
}


def ran(lib, run, rates, *, kind=KIND, first_s=99.0):
    """A run's folder whose steps took 2 s each at these rates, the first one with the filling of queues."""
    folder = Path(lib) / "runs" / run
    folder.mkdir(parents=True)
    lines = [{"step": 1, "tokens": 1000, "step_s": first_s, "compile": False}]
    lines += [
        {"step": n + 2, "tokens": rate * 2, "step_s": 2.0, "compile": False} for n, rate in enumerate(rates)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "state.json").write_text('{"pipeline": {"split": "6:2"}}')
    record = {"id": run, "release": "3f9a", "recipe": "r", **kind}
    (folder / "run.json").write_text(json.dumps(record))
    return str(folder), record


def test_the_best_of_the_runs_of_a_kind_is_their_baseline(tmp_path):
    for run, rates in (("r-0001", [500] * 50), ("r-0002", [900] * 49 + [5]), ("r-0003", [700] * 80)):
        baseline.Keeper(*ran(tmp_path, run, rates)).note()
    folder, record = ran(tmp_path, "r-0004", [])
    found = baseline.best(folder, record)
    assert (found["tokens_per_s"], found["run"], found["runs"]) == (900, "r-0002", 3)
    assert (found["split"], found["driver"]) == ("6:2", "580.159.04")


def test_fewer_than_fifty_steady_steps_are_no_measurement(tmp_path):
    folder, record = ran(tmp_path, "r-0001", [500] * 49)
    baseline.Keeper(folder, record).note()
    assert baseline.best(folder, record) is None


@pytest.mark.parametrize("change", ["config_hash", "gpus", "versions"])
def test_another_kind_of_run_has_another_baseline(tmp_path, change):
    other = {"config_hash": "1", "gpus": {"names": {"NVIDIA H200": 7}}, "versions": {"torch": "2.12"}}[change]
    baseline.Keeper(*ran(tmp_path, "r-0001", [500] * 50)).note()
    assert baseline.best(*ran(tmp_path, "r-0002", [500] * 50, kind={**KIND, change: other})) is None


def test_without_a_gpu_there_is_no_baseline(tmp_path):
    folder, record = ran(tmp_path, "r-0001", [500] * 50, kind={**KIND, "gpus": {"names": {}}})
    baseline.Keeper(folder, record).note()
    assert baseline.path(folder, record) is None and not (tmp_path / "baselines").exists()


def test_a_file_remembers_ten_runs_and_a_damaged_one_is_begun_anew(tmp_path):
    for number in range(1, 13):
        baseline.Keeper(*ran(tmp_path, f"r-{number:04d}", [100 + number] * 50)).note()
    (place,) = (tmp_path / "baselines").iterdir()
    kept = json.loads(place.read_text())
    assert [each["run"] for each in kept["runs"]] == [f"r-{number:04d}" for number in range(3, 13)]
    place.write_text('{"runs": [1, {"run": 5}, {"tokens_per_s": 7}]}')
    folder, record = ran(tmp_path, "r-0013", [50] * 50)
    assert baseline.best(folder, record) is None
    baseline.Keeper(folder, record).note()
    assert baseline.best(folder, record)["tokens_per_s"] == 50


def test_a_run_that_becomes_slow_keeps_its_own_best(tmp_path):
    folder, record = ran(tmp_path, "r-0001", [800] * 50)
    keeper = baseline.Keeper(folder, record)
    keeper.note()
    lines = (Path(folder) / "metrics.jsonl").read_text()
    slow = "".join(json.dumps({"step": 60 + n, "tokens": 10, "step_s": 2.0}) + "\n" for n in range(60))
    (Path(folder) / "metrics.jsonl").write_text(lines + slow)
    assert baseline.median_rate(folder) == 5
    keeper.note()
    assert baseline.best(folder, record)["tokens_per_s"] == 800


def test_a_run_leaves_its_speed_to_the_next_one(ready):
    """The real supervisor writes it when the run ends, and the next look at a run of this kind has it."""
    driver(ready, RECORDED)
    steady = {"tokens": 1234, "steps": 60, "step_s": 0.001}
    run = ready.start(recipe=steady).result["run"]
    ready.wait_for(lambda: (ready.run_dir(run) / "exit.json").exists(), "the run's end")
    record = ready.file(run, "run.json")
    assert record["gpus"]["names"] == {"NVIDIA H200": 1}
    found = ready.call("snapshot", run=run).result["run"]["baseline"]
    assert found["run"] == run and found["tokens_per_s"] == pytest.approx(1234.0)
    assert time.time() - found["at"] < 60
