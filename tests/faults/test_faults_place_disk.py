"""Disks without room or inodes, a small /dev/shm, a release changed by hand, an old or missing Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .house import ROOT, House
from .small import fill, fill_inodes, small
from .table import fault

ROOTS = {
    "opt": "/opt/pctrun",
    "lib": "/var/lib/pctrun",
    "cache": "/var/cache/pctrun",
    "run": "/run/pctrun",
}
MIB = 1 << 20


@pytest.fixture
def tight(house: House) -> Iterator[tuple[str, Path]]:
    """A box whose releases lie on 8 MiB and 300 inodes, with one release in it."""
    with small(house, "tight", "size=8m,nr_inodes=300") as (inner, outer):
        house.change_payload()
        box = house.box("tight", roots={**ROOTS, "opt": f"{inner}/opt", "run": "/run/tight"})
        said = house.type("deploy", "--box", box)
        assert said.code == 0, said
        yield box, outer


def current(outer: Path) -> str:
    return str((outer / "opt" / "current").readlink())


def names(outer: Path) -> list[str]:
    return sorted(path.name for path in (outer / "opt" / "releases").iterdir())


@fault(
    "no room for a release",
    promised="refused before a byte travels, with what is there and what is needed; `current` stays",
    seen="exit 9, `free, this release needs`, `remove what fills that disk`",
)
def test_no_room_for_a_release(house: House, tight: tuple[str, Path]) -> None:
    box, outer = tight
    before, had = current(outer), names(outer)
    house.change_payload(9 * MIB)
    house.wire.heal()
    said = house.type("deploy", "--box", box)
    assert said.code == 9 and "free, this release needs" in said.err, said
    assert "remove what fills that disk" in said.err and house.wire.passed["up"] < MIB
    assert (current(outer), names(outer)) == (before, had)


@fault(
    "disk fills up while a release arrives",
    promised="one line with the file; `current` stays, nothing of the new one is left",
    seen="exit 9, `no space left on the disk while writing`; with room again the same command deploys",
)
def test_a_disk_that_fills_up_under_a_deploy(house: House, tight: tuple[str, Path]) -> None:
    box, outer = tight
    before, had = current(outer), names(outer)
    wanted = house.change_payload(4 * MIB)
    house.wire.rate = 4 * MIB

    def arriving() -> bool:
        return any((outer / "opt" / "releases").glob(".incoming-*/trainer/extra.bin"))

    with house.when(arriving, lambda: fill(outer)):
        said = house.type("deploy", "--box", box)
    assert said.code == 9 and "no space left on the disk while writing" in said.err, said
    assert (current(outer), names(outer)) == (before, had)
    (outer / "filler").unlink()
    house.wire.heal()
    assert house.type("deploy", "--box", box).out.split()[:2] == ["deployed", wanted]


@fault(
    "inodes used up where releases lie",
    promised="told as inodes, not as bytes: a person looks for the right thing; `current` stays",
    seen="exit 9, `inodes free, this release needs`; doctor's line `inodes`",
)
def test_no_inodes_for_a_release(house: House, tight: tuple[str, Path]) -> None:
    box, outer = tight
    before, had = current(outer), names(outer)
    house.change_payload()
    many = fill_inodes(outer, leave=20)
    said = house.type("deploy", "--box", box)
    assert said.code == 9 and "20 inodes free, this release needs" in said.err, said
    assert "inodes free, this release needs" in said.err and "small files" in said.err
    assert (current(outer), names(outer)) == (before, had)
    checks = {check["name"]: check for check in house.type("doctor", "--box", box, "--json").json["checks"]}
    assert checks["inodes"]["state"] != "ok", checks["inodes"]
    for path in many.iterdir():
        path.unlink()


@pytest.fixture
def narrow(house: House) -> Iterator[tuple[str, Path]]:
    """A box whose runs lie on 1 MiB and 120 inodes."""
    with small(house, "narrow", "size=1m,nr_inodes=120") as (inner, outer):
        yield house.box("narrow", roots={**ROOTS, "lib": f"{inner}/lib", "run": "/run/narrow"}), outer
        house.type("abort", "--box", "narrow")


@fault(
    "no room for two checkpoints, none at all, or no inode where runs lie",
    promised="refused before anything is stopped or made; no half-made run is left",
    seen="exit 9, `free, two checkpoints need`; `no space left on the disk`; `no inode left on the disk`",
)
def test_no_room_for_a_run(house: House, narrow: tuple[str, Path]) -> None:
    box, outer = narrow
    first = house.type("restart", "--box", box, "--json").json["start"]["run"]
    runs = outer / "lib" / "runs"
    said = house.type("restart", "--box", box, "--set=checkpoint_bytes=1000000")
    assert said.code == 9 and "free, two checkpoints need" in said.err, said
    assert "stopped" not in said.err and house.status(box)["snapshot"]["run"]["id"] == first
    assert house.type("abort", "--box", box).code == 0
    had = sorted(runs.iterdir())
    filler = fill(outer)
    said = house.type("restart", "--box", box, "--set=checkpoint_bytes=0")
    assert said.code == 9 and "no space left on the disk" in said.err, said
    assert sorted(runs.iterdir()) == had
    filler.unlink()
    fill_inodes(outer)
    said = house.type("restart", "--box", box)
    assert said.code == 9 and "no inode left on the disk" in said.err, said
    assert sorted(runs.iterdir()) == had


@fault(
    "disk nearly full, then full, under a trainer that does not bear it",
    promised="degraded with the disk as the reason; its end is explained by the disk, with the mend",
    seen="exit 2, `DEGRADED`, what is free; exit 4, `CRASHED`, `No space left on device`, the mend",
)
def test_a_full_disk_under_a_run_is_told(house: House, narrow: tuple[str, Path]) -> None:
    box, outer = narrow
    # no checkpoints meanwhile: theirs are the inodes of a few seconds
    house.type("restart", "--box", box, "--set=tokens=100", "--set=save_every=0")
    house.wait_for(lambda: house.type("status", "--box", box).code == 2, "a steady step")
    said = house.type("status", "--box", box)
    assert "DEGRADED" in said.out and f"{outer.name}/lib has" in said.out, said
    filler = fill(outer)
    house.wait_for(lambda: not house.alive(), "the stand-in dies of it")
    said = house.type("status", "--box", box)
    assert said.code == 4 and "CRASHED" in said.out and "No space left on device" in said.out, said
    assert "invoke runs.prune" in said.out
    filler.unlink()
    assert house.type("restart", "--box", box).code == 0


@fault(
    "the workstation's disk fills up while a drafter arrives",
    promised="what has arrived stays, the rest comes with the same command; nothing half-made looks whole",
    seen="exit 1, the folder, `No space left on device`, `what has arrived stays`; then whole",
)
def test_our_own_disk_fills_up_under_a_fetch(house: House, tmp_path: Path) -> None:
    run = house.type("restart", "--json").json["start"]["run"]
    assert house.type("abort").code == 0
    data = os.urandom(3 * MIB)
    (max((house.runs / run / "checkpoints").iterdir()) / "model.safetensors").write_bytes(data)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        house.wire.rate = 2 * MIB

        def half() -> bool:
            return any(path.stat().st_size > MIB for path in tmp_path.glob(".*.part/model.safetensors"))

        with house.when(half, lambda: fill(tmp_path)):
            said = house.type("fetch", run, "--out", str(tmp_path))
        assert said.code == 1 and f"{tmp_path}/" in said.err and "No space left on device" in said.err, said
        assert "what has arrived stays" in said.err
        assert [path.name for path in tmp_path.glob("[!.]*")] == ["filler"]
        (tmp_path / "filler").unlink()
        house.wire.heal()
        again = house.type("fetch", run, "--out", str(tmp_path))
        assert again.code == 0 and "of it now" in again.out, again
        [weights] = tmp_path.glob("*/model.safetensors")
        assert weights.read_bytes() == data
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@fault(
    "a disk that has become read-only",
    promised="told as that, with where to look; looks go on",
    seen="deploy and restart exit 9, `is read-only`, `dmesg | tail`; status shows the last run",
)
def test_a_read_only_disk_is_told(house: House, narrow: tuple[str, Path]) -> None:
    box, outer = narrow
    run = house.type("restart", "--box", box, "--json").json["start"]["run"]
    assert house.type("abort", "--box", box).code == 0
    enter = ["nsenter", "-t", str(house.init), "-m", "mount", "-o"]
    remount = [*enter, "remount,ro", f"/var/{outer.name}"]
    house.wait_for(lambda: subprocess.run(remount, check=False).returncode == 0, "nobody writes there")
    both = house.box("both", roots={name: f"/var/{outer.name}/lib/{name}" for name in ROOTS})
    for said in (house.type("restart", "--box", box), house.type("deploy", "--box", both)):
        assert said.code == 9 and "is read-only" in said.err and "dmesg | tail" in said.err, said
    seen = house.status(box)
    assert (seen["verdict"], seen["snapshot"]["run"]["id"]) == ("stopped", run)


@fault(
    "/dev/shm too small for the model",
    promised="doctor says what cannot be staged and the line that mends it; a run starts",
    seen="doctor: `it cannot be staged there`, `lxc.mount.entry: tmpfs dev/shm`; restart exit 0",
)
def test_a_small_dev_shm_is_told_with_the_mend(house: House) -> None:
    weights = house.payload / "model" / "model.safetensors"
    weights.write_bytes(bytes(200_000))
    assert house.type("deploy").code == 0
    with small(house, "unused", "size=64k"):  # skips where mounts are not allowed
        enter = ["nsenter", "-t", str(house.init), "-m", "mount", "-o"]
        subprocess.run([*enter, "remount,size=64k", "/dev/shm"], check=True)
        try:
            checks = {check["name"]: check for check in house.type("doctor", "--json").json["checks"]}
            assert "it cannot be staged there" in checks["/dev/shm"]["says"], checks["/dev/shm"]
            assert "lxc.mount.entry: tmpfs dev/shm" in checks["/dev/shm"]["mend"]
            assert house.type("restart").code == 0
        finally:
            subprocess.run([*enter, "remount,size=50%", "/dev/shm"], check=True)
            weights.unlink()


@fault(
    "a release changed by hand in the container",
    promised="never run under a name that lies; deploy keeps the changed one aside and makes it whole",
    seen="restart exit 9, `was changed by hand: trainer/__main__.py`; deploy: `it is made again`, then whole",
)
def test_a_release_changed_by_hand_is_not_started_and_is_made_again(house: House) -> None:
    assert house.type("deploy").code == 0
    run = house.type("restart", "--json").json["start"]["run"]
    release = house.whole()
    edited = house.opt / "releases" / release / "trainer" / "__main__.py"
    edited.write_text(edited.read_text() + "# quick\n")
    said = house.type("restart")
    assert said.code == 9 and "was changed by hand: trainer/__main__.py" in said.err, said
    assert list(house.alive()) == [run], "what could not start anew was not stopped"
    again = house.type("deploy")
    assert again.code == 0 and "it is made again" in again.err, again
    assert house.whole() == release
    kept = [name for name in house.releases() if name.startswith(".edited-")]
    [aside] = [house.opt / "releases" / name for name in kept if release in name]
    assert "# quick" in (aside / "trainer" / "__main__.py").read_text()
    assert house.type("restart").code == 0


@fault(
    "no Python, or none that starts, in the container",
    promised="one line with the mend before anything is done",
    seen="exit 9, `has no /usr/bin/python9 that runs`, `apt-get install -y python3`",
)
@pytest.mark.parametrize("task", ["status", "deploy", "restart", "abort"])
def test_a_container_without_python_says_so(house: House, task: str) -> None:
    said = house.type(task, "--box", house.box("bare", agent_python="/usr/bin/python9"))
    assert said.code == 9, said
    assert "has no /usr/bin/python9 that runs" in said.err and "apt-get install -y python3" in said.err


@fault(
    "agent sent to Python 3.9",
    promised="every module of the agent is Python 3.9 (all verbs run on a real one where there is one)",
    seen="ruff for `py39` over every module finds nothing that 3.9 would not read or evaluate",
)
def test_the_agent_is_python_3_9() -> None:
    rules = ["--isolated", "--target-version", "py39", "--select", "E9,F,FA102,YTT"]
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rules, str(ROOT / "remote_payload" / "agent")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
