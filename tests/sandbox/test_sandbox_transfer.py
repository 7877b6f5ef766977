"""`pct push` and `pct pull` with every trap of the real ones."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading

import pytest


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(b"content\n")
    path.chmod(0o750)
    return path


def test_push_copies_and_does_not_carry_the_mode(box, source):
    assert box.pct("push", "200", str(source), "/root/new").code == 0
    assert box.inside("stat -c '%a %u:%g' /root/new; cat /root/new") == "644 0:0\ncontent"


def test_push_over_an_old_file_keeps_its_mode(box, source):
    box.inside("echo something much longer than before >/root/old; chmod 600 /root/old")
    assert box.pct("push", "200", str(source), "/root/old").code == 0
    assert box.inside("stat -c %a /root/old; cat /root/old") == "600\ncontent"


@pytest.mark.parametrize("perms", ["755", "0755"])
def test_push_sets_octal_permissions(box, source, perms):
    box.pct("push", "200", str(source), "/root/perms", "--perms", perms)
    assert box.inside("stat -c %a /root/perms") == "755"


def test_push_takes_names_of_the_container(box, source):
    done = box.pct("push", "200", str(source), "/root/owned", "--user", "root", "--group", "root")
    assert (done.code, done.err) == (0, "")


def test_relative_destination_is_below_the_root(box, source):
    box.pct("push", "200", str(source), "tmp/relative")
    assert box.inside("cat /tmp/relative") == "content"


def test_push_reads_stdin_by_its_device_name(box):
    assert box.pct("push", "200", "/dev/stdin", "/root/piped", stdin=b"from a pipe").code == 0
    assert box.inside("cat /root/piped") == "from a pipe"


def test_dash_is_a_file_name(box):
    done = box.pct("push", "200", "-", "/root/dash", stdin=b"x")
    assert (done.code, done.err.count("\n")) == (0, 1)


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("missing", "/root/x", []),
        ("source", "/no/such/folder/x", []),
        ("source", "/root", []),
        ("source", "/root/x", ["--user", "no-such-user"]),
        ("source", "/root/x", ["--perms", "9z"]),
        ("source", "/usr/bin/x", []),
    ],
)
def test_push_that_fails_is_one_line_and_exit_0(box, source, name, target, options):
    done = box.pct("push", "200", str(source.parent / name), target, *options)
    assert done.code == 0
    assert done.err.count("\n") == 1


def test_push_to_a_running_program_fails_with_exit_0(box, source):
    box.inside("cp /bin/sleep /root/busy")
    sleeper = subprocess.Popen([box.folder / "bin" / "pct", "exec", "200", "--", "/root/busy", "600"])
    box.wait_for(lambda: box.runs("/root/busy 600"), "the program runs")
    done = box.pct("push", "200", str(source), "/root/busy")
    assert (done.code, "Text file busy" in done.err) == (0, True)
    box.inside("pkill -x busy")
    assert sleeper.wait(60) == 128 + 15


def test_push_of_a_directory_leaves_an_empty_file(box, tmp_path):
    done = box.pct("push", "200", str(tmp_path), "/root/folder")
    assert (done.code, done.err) == (0, "")
    assert box.inside("stat -c '%s %F' /root/folder") == "0 regular empty file"


def test_full_disk_truncates_in_silence(box, second, tmp_path):
    big = tmp_path / "big"
    big.write_bytes(bytes(3 << 20))
    box.inside("mkdir /mnt/small; mount -t tmpfs -o size=1M none /mnt/small", second)
    done = box.pct("push", str(second), str(big), "/mnt/small/big")
    assert (done.code, done.err) == (0, "")
    assert box.inside("stat -c %s /mnt/small/big", second) == str(1 << 20)


def test_push_to_a_stopped_or_absent_container_is_255(box, second, source):
    box.pct("stop", str(second))
    for vmid in (str(second), "999"):
        done = box.pct("push", vmid, str(source), "/x")
        assert (done.code, "can only push files to a running CT" in done.err) == (255, True)


def test_pull_copies(box, tmp_path):
    box.inside("echo pulled >/root/p; chmod 700 /root/p")
    target = tmp_path / "target"
    assert box.pct("pull", "200", "/root/p", str(target)).code == 0
    assert target.read_text() == "pulled\n"
    assert target.stat().st_mode & 0o777 == 0o644


def test_pull_of_a_missing_file_destroys_the_old_target(box, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    done = box.pct("pull", "200", "/root/missing", str(target))
    assert (done.code, done.err.count("\n"), target.read_text()) == (0, 1, "")


def test_pull_to_stdout(box):
    box.inside("printf abc >/root/abc")
    assert box.pct("pull", "200", "/root/abc", "/dev/stdout").out == b"abc"


def test_push_writes_in_place(box):
    """Not atomic: a reader sees the half that has arrived."""
    reader, writer = os.pipe()
    push = subprocess.Popen(
        [box.folder / "bin" / "pct", "push", "200", "/dev/stdin", "/root/slow"], stdin=reader
    )
    os.close(reader)
    os.write(writer, b"first half")
    box.wait_for(
        lambda: box.inside("cat /root/slow 2>/dev/null || true") == "first half", "the half is visible"
    )
    os.close(writer)
    assert push.wait(60) == 0


def test_configuration_lock_makes_others_wait_and_then_fail(box, second, source):
    """Ten seconds, then 4 for push and 255 for stop; exec and status do not care. One wait serves both."""
    lock = box.folder / "lock" / f"pve-config-{second}.lock"
    results = {}

    def call(*words: str) -> None:
        results[words[0]] = box.pct(*words)

    with open(lock, "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        threads = [
            threading.Thread(target=call, args=("push", str(second), str(source), "/x")),
            threading.Thread(target=call, args=("stop", str(second))),
        ]
        for thread in threads:
            thread.start()
        assert box.pct("exec", str(second), "--", "true").code == 0
        assert box.pct("status", str(second)).out == b"status: running\n"
        for thread in threads:
            thread.join()
    for name, code in (("push", 4), ("stop", 255)):
        assert results[name].code == code
        assert "can't lock file" in results[name].err
        assert "got timeout" in results[name].err


def test_push_that_waited_succeeds_with_words_on_stderr(box, second, source):
    lock = box.folder / "lock" / f"pve-config-{second}.lock"
    with open(lock, "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        push = subprocess.Popen(
            [box.folder / "bin" / "pct", "push", str(second), str(source), "/x"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert push.stderr is not None
        assert "trying to acquire lock" in push.stderr.readline()
    assert push.wait(60) == 0
    push.stderr.close()
    assert box.inside("cat /x", second) == "content"
