"""A release's name is its content, its tar is the same bytes each time, and a moving file is noticed."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest

from controller import release
from controller.errors import PctrunError, Usage


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    root = tmp_path / "payload"
    (root / "trainer" / "__pycache__").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "trainer" / "a.py").write_text("a = 1\n")
    (root / "trainer" / "__pycache__" / "a.pyc").write_text("x")
    (root / "trainer" / "b.pyc").write_text("x")
    (root / ".hidden" / "x").write_text("x")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o700)
    (root / "empty").write_text("")
    (root / ("deep" * 30)).mkdir()
    (root / ("deep" * 30) / "ü.txt").write_text("long and not ASCII")
    return root


def test_only_what_belongs_to_the_payload_travels(payload: Path) -> None:
    found = {entry.path: (entry.bytes, entry.mode) for entry in release.scan(payload).entries}
    assert found == {
        "trainer/a.py": (6, 0o644),
        "run.sh": (10, 0o755),
        "empty": (0, 0o644),
        f"{'deep' * 30}/ü.txt": (18, 0o644),
    }


def test_the_name_changes_with_content_path_and_mode_and_nothing_else(payload: Path) -> None:
    first = release.scan(payload).id
    (payload / "trainer" / "a.py").touch()
    (payload / ".hidden" / "y").write_text("y")
    assert release.scan(payload).id == first
    (payload / "empty").chmod(0o755)
    second = release.scan(payload).id
    (payload / "empty").rename(payload / "hollow")
    third = release.scan(payload).id
    (payload / "hollow").write_text("!")
    assert len({first, second, third, release.scan(payload).id}) == 4


def test_the_tar_holds_exactly_the_wanted_files(payload: Path) -> None:
    found = release.scan(payload)
    stream = b"".join(release.tar(found, [entry.path for entry in found.entries]))
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        members = archive.getmembers()
        for member, entry in zip(members, found.entries, strict=True):
            file = archive.extractfile(member)
            assert file is not None
            assert (member.name, member.mode, member.mtime, member.uid) == (entry.path, entry.mode, 0, 0)
            assert hashlib.sha256(file.read()).hexdigest() == entry.sha256


def test_equal_content_gives_equal_bytes_of_the_announced_size(payload: Path) -> None:
    found = release.scan(payload)
    wanted = ["empty", "run.sh", "trainer/a.py"]
    once, twice = b"".join(release.tar(found, wanted)), b"".join(release.tar(release.scan(payload), wanted))
    assert once == twice
    assert len(once) == release.tar_bytes(found, wanted)


@pytest.mark.parametrize("content", ["a = 2\n", "a = 1\nlonger", ""])
def test_a_file_that_changes_after_the_hash_stops_the_stream(payload: Path, content: str) -> None:
    found = release.scan(payload)
    (payload / "trainer" / "a.py").write_text(content)
    with pytest.raises(PctrunError, match=r"trainer/a.py changed while it was being sent"):
        list(release.tar(found, ["trainer/a.py"]))


def test_a_change_time_that_tells_saves_the_second_hash_and_misses_no_change(
    payload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time.sleep(0.2)  # the files are older than the kernel's tick
    found = release.scan(payload)
    assert all(entry.changed_ns for entry in found.entries)
    hashed = []
    monkeypatch.setattr(release.hashlib, "sha256", lambda: hashed.append(1))
    whole = b"".join(release.tar(found, ["trainer/a.py"]))
    assert b"a = 1\n" in whole and not hashed
    facts = (payload / "trainer" / "a.py").stat()
    (payload / "trainer" / "a.py").write_text("a = 2\n")
    os.utime(payload / "trainer" / "a.py", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(PctrunError, match=r"trainer/a.py changed while it was being sent"):
        list(release.tar(found, ["trainer/a.py"]))


def test_a_big_file_is_never_in_memory(payload: Path) -> None:
    with (payload / "weights").open("wb") as file:
        file.truncate(64 << 20)
    found = release.scan(payload)
    tracemalloc.start()
    total = sum(len(piece) for piece in release.tar(found, ["weights"]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 64 << 20
    assert peak < 2 << 20


def test_a_symbolic_link_is_refused(payload: Path) -> None:
    (payload / "link").symlink_to("run.sh")
    with pytest.raises(Usage, match="symbolic link"):
        release.scan(payload)


def test_an_unknown_path_is_not_sent(payload: Path) -> None:
    with pytest.raises(PctrunError, match="not in release"):
        list(release.tar(release.scan(payload), ["../../etc/passwd"]))
