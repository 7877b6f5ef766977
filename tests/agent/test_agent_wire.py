"""The envelope must hold for every input: one end frame, one line of error, nothing else on stdout."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAYLOAD = Path(__file__).resolve().parents[2] / "remote_payload"


def test_every_call_ends_with_one_end_frame_and_status_0(box):
    answer = box.call("snapshot")
    assert answer.end["schema"] == 1 and answer.end["verb"] == "snapshot" and answer.end["ok"] is True
    assert answer.status == 0 and answer.stderr == b""


@pytest.mark.parametrize(
    ("verb", "args", "words"),
    [
        ("snapshott", {}, "there is no verb 'snapshott'"),
        ("snapshot", {"log_linse": 5}, "takes no argument 'log_linse'"),
        ("snapshot", {"log_lines": "5"}, "log_lines must be a whole number"),
        ("snapshot", {"log_lines": True}, "log_lines must be a whole number"),
        ("snapshot", {"log_lines": -1}, "log_lines must be 0 or more"),
        ("exec", {"argv": []}, "exec needs argv"),
        ("exec", {"argv": ["a\0b"]}, "exec needs argv"),
        ("exec", {"argv": ["echo", "\ud800"]}, "lone surrogate"),
    ],
)
def test_bad_input_is_one_line_of_usage(box, verb, args, words):
    answer = box.call(verb, **args)
    assert answer.error["kind"] == "usage" and words in answer.error["message"]
    assert "\n" not in answer.error["message"] and answer.status == 1


@pytest.mark.parametrize("roots", [{"opt": "relative"}, {"opt": "/"}, {"opt": "/tmp/.."}, {"home": "/x"}])
def test_a_root_that_could_hit_anything_else_is_refused(box, roots):
    box.roots = {**box.roots, **roots}
    assert box.call("snapshot").error["kind"] == "usage"


@pytest.mark.parametrize("line", [b"{broken", b"", b"[]", b"{}", b'{"nonce": "../../x"}', b'{"nonce": 7}'])
def test_a_request_without_a_nonce_fails_without_a_traceback(box, line):
    process = box.spawn()
    script = box.bundle()
    out, err = process.communicate(b"%d\n%s%s\n" % (len(script), script, line))
    assert out == b"" and process.returncode == 1
    assert err.startswith(b"pctrun agent: the request is not a JSON line") and err.count(b"\n") == 1


def test_a_defect_is_reported_on_one_line_with_the_place_in_the_sources(ready):
    Path(ready.roots["lib"]).mkdir()
    (Path(ready.roots["lib"]) / "runs").write_text("a file where a folder should be")
    error = ready.start().error
    assert error["kind"] == "internal" and "\n" not in error["message"]
    assert "FileExistsError" in error["message"] and "pctrun:agent/start.py:" in error["message"]
    assert "os.makedirs(roots.runs" in error["message"], "the source line itself"


def test_exec_carries_arguments_output_and_status_unchanged(box):
    words = ["", "a b", "$HOME", "`id`", "'", '"', "\n", "é→漢", "-x", "--", "\\", ";", "x" * 100_000]
    program = "import sys, json; json.dump(sys.argv[1:], sys.stdout); sys.stderr.write('warn'); sys.exit(7)"
    answer = box.call("exec", argv=[sys.executable, "-c", program, *words])
    assert json.loads(answer.out) == words
    assert answer.err == b"warn" and answer.result == {"code": 7, "signal": None}


def test_exec_names_the_signal_that_ended_the_child(box):
    answer = box.call("exec", argv=["sh", "-c", "kill -SEGV $$"])
    assert answer.result == {"code": 139, "signal": "SIGSEGV"}


def test_exec_reads_nothing_unless_asked_and_then_every_byte(box):
    assert box.call("exec", argv=["cat"], stream_bytes=b"lost").out == b""
    data = os.urandom(3_000_000)
    assert box.call("exec", argv=["cat"], stdin=True, stream_bytes=data).out == data


def test_exec_says_when_the_command_cannot_start(box):
    answer = box.call("exec", argv=["no-such-program"])
    assert answer.error["kind"] == "usage" and answer.error["message"] == "command not found: no-such-program"
    assert "no folder" in box.call("exec", argv=["true"], cwd="/no/such").error["message"]


def test_exec_at_its_timeout_ends_the_whole_group_even_one_that_ignores_term(box):
    script = "trap '' TERM; echo $$; sh -c \"trap '' TERM; sleep 60\" & wait; sleep 60"
    process = box.begin("exec", {"argv": ["sh", "-c", script], "timeout_s": 3})
    group = int(box.next_frame(process)[1])
    answer = box.collect(process)
    assert "did not end in 3 s" in answer.error["message"]
    box.wait_for(lambda: not group_lives(group), "the group has ended")


def test_exec_kills_its_child_when_the_reader_goes_away(box):
    process = box.begin("exec", {"argv": ["sh", "-c", "echo $$; sleep 60 & wait"]})
    group = int(box.next_frame(process)[1])
    process.stdout.close()
    assert process.wait(60) == 1
    box.wait_for(lambda: not group_lives(group), "the group has ended")
    process.stdin.close()
    process.stderr.close()


def test_exec_does_not_wait_for_a_background_child_that_keeps_the_pipes(box):
    began = time.monotonic()
    answer = box.call("exec", argv=["sh", "-c", "sleep 30 & echo $!"])
    assert time.monotonic() - began < 25
    os.kill(int(answer.out), signal.SIGKILL)


def test_exec_does_not_wait_for_a_background_child_that_writes_for_ever(box):
    answer = box.call("exec", argv=["sh", "-c", "echo $$; yes & true"])
    group = int(answer.out.split(b"\n", 1)[0])
    assert answer.result["code"] == 0 and len(answer.out) < 16 << 20
    box.wait_for(lambda: not group_lives(group), "the closed pipe ends it")


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return any(  # a zombie that init has yet to reap does not count
        fields[2] == str(group) and fields[0] != "Z"
        for fields in (text.rpartition(")")[2].split() for text in stats())
    )


def stats():
    """Of every process; one may go at any moment."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield path.read_text()


def test_a_person_can_run_a_verb_by_hand(box):
    roots = ",".join(f"{name}={path}" for name, path in box.roots.items())
    argv = [sys.executable, "-m", "agent", "snapshot", '{"log_lines": 5}', "--roots", roots]
    done = subprocess.run(argv, cwd=PAYLOAD, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["run"] is None
    shown = subprocess.run([*argv[:3], "--help"], cwd=PAYLOAD, capture_output=True, text=True).stdout
    assert "snapshot:" in shown and "log_lines" in shown and "cannot be loaded" not in shown
