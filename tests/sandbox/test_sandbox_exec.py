"""`pct exec` over the real SSH server behaves as on a real Proxmox host."""

from __future__ import annotations

import os
import shlex
import subprocess
import time

import pytest

HOSTILE = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "$HOME",
    "`id`",
    ";",
    "\n",
    "\\",
    "*",
    "--",
    "-x",
    "--keep-env",
    "\t",
    "#",
    "!",
]


@pytest.mark.parametrize("code", [0, 1, 2, 126, 255])
def test_exit_status_passes_unchanged(ssh, code):
    assert ssh(f"pct exec 200 -- sh -c 'exit {code}'").code == code


@pytest.mark.parametrize(("name", "number"), [("KILL", 9), ("TERM", 15), ("SEGV", 11)])
def test_child_killed_by_a_signal_is_128_plus_its_number(ssh, name, number):
    assert ssh(f"pct exec 200 -- bash -c 'kill -{name} $$'").code == 128 + number


@pytest.mark.parametrize(
    ("program", "code"), [("no-such-program", 127), ("/no/such", 127), ("/etc", 126), ("''", 127)]
)
def test_program_that_cannot_start_says_failed_to_exec(ssh, program, code):
    done = ssh(f"pct exec 200 -- {program}")
    assert done.code == code
    assert "Failed to exec" in done.err
    assert done.out == b""


def test_script_without_first_line_is_run_by_sh(box, ssh):
    box.inside("printf 'exit 7' >/root/bare; chmod +x /root/bare")
    assert ssh("pct exec 200 -- /root/bare").code == 7


def test_one_shlex_join_carries_every_argument(ssh):
    line = shlex.join(["pct", "exec", "200", "--", "printf", r"%s\0", *HOSTILE])
    assert ssh(line).out == b"".join(word.encode() + b"\0" for word in HOSTILE)


def test_stdout_and_stderr_stay_apart(ssh):
    done = ssh("pct exec 200 -- sh -c 'echo out; echo err >&2'")
    assert (done.out, done.err) == (b"out\n", "err\n")


def test_binary_stdin_comes_back_exactly(ssh):
    data = os.urandom(5_000_000)
    assert ssh("pct exec 200 -- cat", stdin=data).out == data


def test_script_on_stdin_is_exact_in_any_locale(ssh):
    assert ssh("pct exec 200 -- bash -s", stdin="echo é→漢".encode()).out.decode() == "é→漢\n"


def test_unread_stdin_does_no_harm(ssh):
    assert ssh("pct exec 200 -- true", stdin=bytes(3_000_000)).code == 0


def test_stdin_ends_at_once_without_data(ssh):
    assert ssh("pct exec 200 -- wc -c").out.strip() == b"0"


def test_exec_eats_the_callers_stdin(ssh):
    loop = 'while read -r line; do pct exec 200 -- sh -c "cat >/dev/null"; echo "$line"; done'
    assert ssh(loop, stdin=b"one\ntwo\nthree\n").out == b"one\n"


def test_non_ascii_arguments_are_destroyed_in_a_c_locale(ssh):
    done = ssh("pct exec 200 -- echo é→漢")
    assert done.code == 0
    assert done.out.decode() == "\N{REPLACEMENT CHARACTER}" * 8 + "\n"


@pytest.mark.parametrize("prefix", ["LANG=C.UTF-8", "LC_ALL=C.UTF-8", "LC_CTYPE=en_US.utf8"])
def test_non_ascii_arguments_are_exact_in_a_utf8_locale(ssh, prefix):
    assert ssh(f"{prefix} pct exec 200 -- echo é→漢").out.decode() == "é→漢\n"


def test_invalid_utf8_is_destroyed_in_any_locale(ssh):
    assert ssh("LANG=C.UTF-8 pct exec 200 -- echo $'a\\xffb'").out.decode() == "a\N{REPLACEMENT CHARACTER}b\n"


def test_lang_that_the_client_sends_reaches_the_host(ssh):
    assert ssh("pct exec 200 -- echo é", env={"LANG": "C.UTF-8"}).out.decode() == "é\n"


def test_other_variables_of_the_client_are_not_accepted(ssh):
    assert ssh("env", env={"EVIL": "1"}).out.find(b"EVIL") == -1


def environment(output: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.decode().splitlines())


def test_keep_env_is_the_default_and_overwrites_path(ssh):
    env = environment(ssh("export FROM_HOST=yes; pct exec 200 -- env").out)
    assert env["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin"
    assert (env["TERM"], env["container"], env["FROM_HOST"]) == ("linux", "lxc", "yes")
    assert {"SSH_CONNECTION", "SSH_CLIENT", "USER", "LOGNAME", "MAIL", "SHELL", "PWD"} <= env.keys()
    assert (env["HOME"], env["USER"], env["PWD"]) == ("/root", "root", "/root")
    assert not any(name == "LANG" or name.startswith("LC_") for name in env)


def test_keep_env_0_leaves_three_variables(ssh):
    assert environment(ssh("pct exec 200 --keep-env 0 -- env").out) == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "TERM": "linux",
        "container": "lxc",
    }


def test_directory_is_the_hosts_if_it_exists_inside_else_the_root(ssh):
    assert ssh("pct exec 200 -- pwd").out == b"/root\n"
    assert ssh("cd /usr/lib; pct exec 200 -- pwd").out == b"/usr/lib\n"
    assert ssh("mkdir -p sub; cd sub; pct exec 200 -- pwd").out == b"/\n"
    assert ssh("cd /boot; pct exec 200 -- pwd").out == b"/\n"


def test_umask_is_022(ssh):
    assert ssh("pct exec 200 -- sh -c umask").out == b"0022\n"


def test_only_sigpipe_is_ignored_inside(ssh):
    ignored = ssh("pct exec 200 -- sh -c 'grep SigIgn /proc/self/status'").out.split()[1]
    standard = int(ignored, 16) & 0x7FFFFFFF  # above 31 are the C library's own
    assert standard == 1 << 12


def test_writer_to_a_closed_pipe_gets_an_error_not_a_signal(ssh):
    done = ssh("pct exec 200 -- bash -c 'yes | head -1; echo ${PIPESTATUS[0]}'")
    assert done.out == b"y\n1\n"
    assert "Broken pipe" in done.err


def test_line_longer_than_one_argument_fails_on_the_host(ssh):
    done = ssh("pct exec 200 -- echo " + "x" * 131_072)
    assert done.code == 1
    assert "Argument list too long" in done.err


def test_long_argument_below_the_limit_arrives(ssh):
    assert len(ssh("pct exec 200 -- echo " + "x" * 130_000).out) == 130_001


def test_stopped_container_is_255_not_running(box, second):
    assert box.pct("stop", str(second)).code == 0
    done = box.pct("exec", str(second), "--", "true")
    assert done.code == 255
    assert "not running!" in done.err
    assert box.pct("start", str(second)).code == 0


def test_exec_ignores_a_configuration_lock(box, second):
    with open(box.host.config_path(second), "a") as file:
        file.write("lock: backup\n")
    assert box.pct("exec", str(second), "--", "true").code == 0


def test_background_job_that_holds_stdout_holds_the_channel(ssh):
    begun = time.monotonic()
    assert ssh("pct exec 200 -- bash -c 'sleep 1 & exit 5'").code == 5
    assert time.monotonic() - begun >= 1


def test_background_job_without_our_pipes_is_left_alone(box, ssh):
    begun = time.monotonic()
    assert ssh("pct exec 200 -- bash -c 'sleep 600.3 >/dev/null 2>&1 </dev/null & exit 5'").code == 5
    assert time.monotonic() - begun < 60
    assert box.runs("sleep 600.3")
    box.inside("pkill -x -f 'sleep 600.3'")


def test_pkill_by_pattern_kills_the_shell_that_carries_it(box):
    """The accident of the seeds: everything after the pkill is lost, in silence."""
    done = box.pct("exec", "200", "--", "bash", "-c", "pkill -9 -f unlikely-pattern-4711; echo never")
    assert (done.code, done.out) == (137, b"")


def test_realistic_mode_costs_cpu_time_per_call(box):
    from controller import sandbox

    def cost(*arguments: str) -> float:
        before = os.times()
        subprocess.run([box.folder / "bin" / "pct", *arguments], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert cost("status", "200") < 0.3
    sandbox.up(realistic=True)
    try:
        assert sandbox.status().realistic
        assert cost("status", "200") > 0.5
        assert sandbox.up() == sandbox.up(realistic=None)
        assert sandbox.status().realistic
    finally:
        sandbox.up(realistic=False)


def test_calls_are_recorded_without_their_arguments(box):
    from controller import sandbox

    before = len(sandbox.pct_calls())
    box.pct("exec", "200", "--", "echo", "secret-word")
    box.pct("bogus", "200")
    assert [name for _, name in sandbox.pct_calls()[before:]] == ["exec"]
    box.pct("status", "200")
    assert [name for _, name in sandbox.pct_calls()[before:]] == ["exec", "status"]
    assert "secret-word" not in (box.folder / "calls.log").read_text()
