"""`current` must point at a whole release at every moment, whatever breaks a deploy and wherever."""

import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.faults.table import fault


def releases(box):
    return sorted(path.name for path in (Path(box.roots["opt"]) / "releases").iterdir())


def assert_current_is_whole(box, files):
    folder = Path(box.roots["opt"]) / "current"
    assert {path: (folder / path).read_bytes() for path in files} == files


def test_first_deploy_streams_everything_and_the_second_says_unchanged(box):
    files = box.payload()
    first = box.deploy(files)
    assert first.result["outcome"] == "deployed" and first.result["previous"] is None
    assert (first.result["files"], first.result["bytes"]) == (len(files), sum(map(len, files.values())))
    assert first.result["versions"].startswith("stand-in 1 finished python 3.")
    assert_current_is_whole(box, files)
    again = box.call(
        "deploy", release=box.release_of(files), manifest=box.manifest_of(files), python=box.python
    )
    assert again.result["outcome"] == "unchanged" and again.result["files"] == 0


def test_a_changed_file_travels_alone_and_going_back_is_a_switch(box):
    old = box.payload()
    box.deploy(old)
    new = box.payload(**{"trainer/extra.py": "A = 1\n"})
    changed = box.deploy(new)
    assert changed.result["outcome"] == "deployed" and changed.result["files"] == 1
    assert changed.result["previous"] == box.release_of(old)
    assert_current_is_whole(box, new)
    back = box.deploy(old)
    assert back.result["outcome"] == "switched" and box.current() == box.release_of(old)
    release = box.call("snapshot").result["release"]
    assert release == {"current": box.release_of(old), "previous": box.release_of(new), "count": 2}


def test_a_release_without_a_new_file_needs_no_stream(box):
    box.deploy(box.payload(**{"trainer/extra.py": "A = 1\n"}))
    fewer = box.payload()
    answer = box.call(
        "deploy", release=box.release_of(fewer), manifest=box.manifest_of(fewer), python=box.python
    )
    assert answer.result["outcome"] == "deployed" and answer.result["files"] == 0


@fault(
    "the stream of files cut at ten random bytes",
    promised="nothing of it is kept",
    seen="`verify`; the current release byte for byte",
    part="way",
)
def test_a_stream_cut_anywhere_leaves_current_and_no_debris(box):
    old = box.payload()
    box.deploy(old)
    new = box.payload(**{f"trainer/new{i}.py": f"A = {random.random()}\n" * 400 for i in range(3)})
    asked = box.call("deploy", **box.release_args(new))
    stream = box.tar_of({path: new[path] for path in asked.result["want"]})
    seed = random.randrange(1 << 30)
    print("seed", seed)
    last_file_ends = len(stream.rstrip(b"\0"))
    for cut in [0, 512, *random.Random(seed).sample(range(last_file_ends), 8)]:
        answer = box.call("deploy", stream_bytes=stream[:cut], stream=True, **box.release_args(new))
        assert answer.error["kind"] == "verify", (cut, answer.end)
        assert box.current() == box.release_of(old) and releases(box) == [box.release_of(old)]
    assert_current_is_whole(box, old)


@fault(
    "the agent killed in mid-deploy",
    promised="the current release stays; the next deploy clears up",
    seen="`unchanged`, no `.incoming-` left",
    part="place",
)
def test_an_agent_killed_in_mid_deploy_leaves_current_and_the_next_deploy_clears_up(box):
    old = box.payload()
    box.deploy(old)
    new = box.payload(**{f"trainer/new{i}.py": "A = 1\n" * 9000 for i in range(3)})
    args = {
        "release": box.release_of(new),
        "manifest": box.manifest_of(new),
        "python": box.python,
        "stream": True,
    }
    process = box.begin("deploy", args)
    process.stdin.write(box.tar_of({path: new[path] for path in new if "new" in path})[:60_000])
    process.stdin.flush()
    box.wait_for(lambda: any(name.startswith(".incoming-") for name in releases(box)), "the deploy has begun")
    process.kill()
    box.collect(process)
    assert box.current() == box.release_of(old)
    assert box.deploy(old).result["outcome"] == "unchanged"
    assert releases(box) == [box.release_of(old)]


@pytest.mark.parametrize(
    "name",
    [
        "../outside.py",
        "/tmp/outside.py",
        "trainer/../../outside.py",
        "trainer/unwanted.py",
        "agent/call.py/x",
    ],
)
def test_a_name_that_the_manifest_does_not_want_is_refused(box, name):
    files = box.payload()
    args = box.release_args(files)
    answer = box.call("deploy", stream_bytes=box.tar_of({name: b"x"}), stream=True, **args)
    assert answer.error["kind"] == "verify" and "does not want" in answer.error["message"]
    assert releases(box) == [] and not Path("/tmp/outside.py").exists()
    entry = {"path": name, "sha256": "0" * 64, "bytes": 1, "mode": 0o644}
    if name != "trainer/unwanted.py":
        assert box.call("deploy", **{**args, "manifest": [*args["manifest"], entry]}).error["kind"] == "usage"


def test_a_damaged_file_and_a_link_are_refused(box):
    files = box.payload()
    args = {
        "release": box.release_of(files),
        "manifest": box.manifest_of(files),
        "python": box.python,
        "stream": True,
    }
    damaged = {**files, "agent/call.py": files["agent/call.py"][:-1] + b"#"}
    answer = box.call("deploy", stream_bytes=box.tar_of(damaged), **args)
    assert answer.error["kind"] == "verify" and "agent/call.py arrived damaged" in answer.error["message"]
    link = tarfile.TarInfo("agent/call.py")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    answer = box.call("deploy", stream_bytes=link.tobuf() + bytes(1024), **args)
    assert "does not want" in answer.error["message"]
    assert releases(box) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("import no_such_module\n", "No module named 'no_such_module'"), ("def broken(:\n", "does not compile")],
)
def test_a_release_that_cannot_be_imported_never_becomes_current(box, text, words):
    old = box.payload()
    box.deploy(old)
    bad = box.payload(**{"trainer/describe.py": text})
    answer = box.deploy(bad)
    assert answer.error["kind"] == "import-check" and words in answer.error["message"]
    assert "trainer/describe.py" in answer.error["hint"] or "trainer/describe.py" in answer.error["message"]
    assert releases(box) == [box.release_of(old)] and box.current() == box.release_of(old)


def test_a_file_that_changes_during_the_import_is_noticed_though_size_and_time_are_as_before(box):
    edits = """import os
facts = os.stat("agent/call.py")
text = open("agent/call.py").read()
open("agent/call.py", "w").write(text[:-1] + "#")
os.utime("agent/call.py", ns=(facts.st_atime_ns, facts.st_mtime_ns))
"""
    text = box.payload()["trainer/describe.py"].decode() + edits
    answer = box.deploy(box.payload(**{"trainer/describe.py": text}))
    assert answer.error["kind"] == "verify", answer.error
    assert answer.error["message"] == "agent/call.py changed while the release was checked"
    assert releases(box) == [] and box.current() is None


def test_a_release_edited_by_hand_is_named_set_aside_and_made_again(box):
    files = box.payload()
    box.deploy(files)
    folder = Path(box.roots["opt"]) / "releases" / box.release_of(files)
    (folder / "trainer" / "describe.py").write_text("VERSION = 'edited by hand'\n")
    (folder / "json.py").write_text("shadows the standard library\n")
    answer = box.deploy(files)
    assert answer.result["outcome"] == "deployed"
    assert answer.result["edited"] == ["json.py", "trainer/describe.py"] and answer.result["files"] == 1
    assert_current_is_whole(box, files)
    kept = next(path for path in folder.parent.iterdir() if path.name.startswith(".edited-"))
    assert "edited by hand" in (kept / "trainer" / "describe.py").read_text()


@fault(
    "disk too full for byte code, after the check",
    promised="the current release stays",
    seen="kind `disk`; the current release byte for byte",
    part="place",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_is_said_and_leaves_current(box):
    opt = Path(box.roots["opt"])
    opt.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(opt)]).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        old = box.payload()
        assert box.deploy(old).result["outcome"] == "deployed"
        too_big = box.payload(**{"trainer/big.py": "#" * 2_000_000})
        refused = box.deploy(too_big)
        assert refused.error["kind"] == "disk" and "iB free, this release needs" in refused.error["message"]
        room = os.statvfs(opt)
        free = room.f_bavail * room.f_frsize
        # passes the check by less than the byte code and the folders take
        filler = (box.base / "opt" / "filler").open("wb")
        new = box.payload(**{"trainer/big.py": f"A = {'#' * 1000}\nB = '{'b' * 100_000}'\n"})
        filler.write(b"\0" * (free - int(sum(map(len, new.values())) * 1.2) - 4096))
        filler.close()
        answer = box.deploy(new)
        assert answer.error["kind"] == "disk" and "no space left" in answer.error["message"], answer.end
        assert box.current() == box.release_of(old) and releases(box) == [box.release_of(old)]
        assert_current_is_whole(box, old)
    finally:
        subprocess.run(["umount", str(opt)], check=True)


def test_the_newest_five_releases_and_those_of_live_runs_are_kept(box):
    in_use = box.payload(**{"trainer/extra.py": "A = 'in use'\n"})
    box.deploy(in_use)
    assert box.start().result["run"] == "r-0001"
    made = [box.release_of(in_use)]
    for number in range(7):
        files = box.payload(**{"trainer/extra.py": f"A = {number}\n"})
        box.deploy(files)
        made.append(box.release_of(files))
    assert releases(box) == sorted([made[0], *made[-5:]])
    box.call("stop")
    files = box.payload(**{"trainer/extra.py": "A = 'last'\n"})
    assert box.deploy(files).result["pruned"] == [made[-5], made[0]]


def test_a_missing_interpreter_is_said(box):
    answer = box.deploy(python="/no/such/python")
    assert answer.error["kind"] == "no-python" and "/no/such/python" in answer.error["message"]
    assert sys.executable not in answer.error["message"]
