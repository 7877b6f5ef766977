"""The second engine's own pieces: the tree that containers begin with, their ids, the front's words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller import sandbox
from controller.sandbox import needs, rootfs
from controller.sandbox.pct import lxc

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners: root only")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with what a real one has: links, a set-id program, two names of one file."""
    made = tmp_path / "tree"
    (made / "usr" / "bin").mkdir(parents=True)
    (made / "bin").symlink_to("usr/bin")
    program = made / "usr" / "bin" / "su"
    program.write_bytes(b"program")
    program.chmod(0o4755)
    (made / "usr" / "bin" / "other").hardlink_to(program)
    return made


@pytest.mark.parametrize("damage", ["byte", "mode", "link", "gone", "more"])
def test_every_damage_changes_the_hash(tree: Path, damage: str) -> None:
    before = rootfs.digest(tree)
    assert before == rootfs.digest(tree)
    program = tree / "usr" / "bin" / "su"
    if damage == "byte":
        program.write_bytes(b"progrbm")
        program.chmod(0o4755)
    elif damage == "mode":
        program.chmod(0o755)
    elif damage == "link":
        (tree / "bin").unlink()
        (tree / "bin").symlink_to("usr/sbin")
    elif damage == "gone":
        program.unlink()
    else:
        (tree / "usr" / "lib").mkdir()
    assert rootfs.digest(tree) != before


@as_root
def test_ids_move_once_and_set_id_bits_stay(tree: Path) -> None:
    for _ in range(2):
        lxc.move_ids(str(tree))
        for path in (tree, tree / "bin", tree / "usr" / "bin" / "su", tree / "usr" / "bin" / "other"):
            assert path.lstat().st_uid == path.lstat().st_gid == lxc.FIRST_ID, path
        assert (tree / "usr" / "bin" / "su").stat().st_mode & 0o7777 == 0o4755


@as_root
@pytest.mark.skipif(not Path("/usr/sbin/debootstrap").exists(), reason="no debootstrap on this machine")
def test_a_mirror_that_has_nothing_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCTRUN_ROOTFS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PCTRUN_DEBIAN_MIRROR", f"file://{tmp_path}/nothing")
    with pytest.raises(sandbox.SandboxError, match=r"debootstrap of \w+ from file:.* failed: ") as caught:
        rootfs.base()
    assert "PCTRUN_DEBIAN_MIRROR" in caught.value.hint
    assert not list((tmp_path / "cache").glob("*.json"))


def test_another_engine_is_refused_while_there_are_files(box) -> None:
    with pytest.raises(sandbox.SandboxError, match="made by bubblewrap") as caught:
        sandbox.up(engine="lxc")
    assert "sandbox.down --wipe" in caught.value.hint
    assert sandbox.up(engine="bubblewrap") == box.endpoint
    assert sandbox.status().containers == {200: True}


def test_without_root_it_is_one_line_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(sandbox.SandboxError, match="needs root") as caught:
        needs.check("lxc")
    assert "leave --engine out" in caught.value.hint


def test_an_unknown_engine_names_those_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "sandbox.up", "--engine", "docker"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "error: no engine is called 'docker'\nhint: one of: bubblewrap, lxc\n",
    )
