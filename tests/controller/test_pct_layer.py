"""One argument list through one shell, and each refusal of pct in one clear line."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.main import VERBS
from controller import bundle, pct
from controller.endpoint import Endpoint

ENDPOINT = Endpoint(host="pve1", vmid=200, agent_python="/usr/bin/python3", python="/opt/python")

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)


def test_the_argument_list_is_the_contracts() -> None:
    assert pct.argv(ENDPOINT) == [
        *("pct", "exec", "200", "--", "/usr/bin/env", "-i"),
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        *("HOME=/root", "LANG=C.UTF-8", "LC_ALL=C.UTF-8"),
        *("/usr/bin/python3", "-I", "-c", pct.BOOT),
    ]


def test_sudo_goes_in_front_and_never_asks() -> None:
    endpoint = Endpoint(host="h", vmid=101, agent_python="python3", python="p", sudo=True)
    assert pct.argv(endpoint)[:5] == ["sudo", "-n", "pct", "exec", "101"]


def test_the_command_line_is_short_and_ascii_whatever_is_sent() -> None:
    line = pct.command(ENDPOINT)
    assert line.isascii()
    assert "\n" not in line
    assert len(line) < 500


@settings(max_examples=40, deadline=None)
@given(texts)
def test_a_login_shell_gives_the_argument_list_back_unchanged(python: str) -> None:
    endpoint = Endpoint(host="h", vmid=200, agent_python=python or "x", python="p")
    script = 'pct() { printf "%s\\0" "$@"; }; ' + pct.command(endpoint)
    seen = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout
    assert seen.decode().split("\0")[:-1] == pct.argv(endpoint)[1:]


def test_the_loader_runs_the_bundle_and_leaves_the_rest_of_stdin() -> None:
    program = zlib.compress(b"import sys\nprint('ran with', sys.stdin.buffer.readline())\n")
    done = subprocess.run(
        [sys.executable, "-I", "-c", pct.BOOT],
        input=b"%d\n%srequest\nrest" % (len(program), program),
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"ran with b'request\\n'\n"


def shipped(verb: str) -> dict[str, str]:
    size, _, program = bundle.preamble(verb).partition(b"\n")
    assert int(size) == len(program)
    program = zlib.decompress(program)
    compile(program, "bundle", "exec")
    first = program.split(b"\n", 1)[0].decode("ascii")
    sources: dict[str, str] = ast.literal_eval(first.removeprefix("SOURCES = "))
    return sources


@pytest.mark.parametrize("verb", VERBS)
def test_the_bundle_of_a_verb_holds_all_that_it_imports(verb: str) -> None:
    sources = shipped(verb)
    assert {"agent", "agent.main", VERBS[verb]} <= sources.keys()
    assert "agent.boot" not in sources
    for text in sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == "agent":
                assert {f"agent.{alias.name}" for alias in node.names} <= sources.keys()
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agent."):
                assert node.module in sources
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("agent") for alias in node.names)


def test_a_look_travels_light_and_an_unknown_verb_gets_the_agents_own_refusal() -> None:
    assert len(bundle.preamble("snapshot")) < 40 * 1024
    assert "agent.deploy" not in shipped("snapshot")
    nobody = shipped("nonsense")
    assert "agent.main" in nobody and not nobody.keys() & set(VERBS.values())


REFUSALS = [
    # status, stderr, exit code, words of the message, words of the hint
    (255, "CT 200 not running!", 5, "container 200 on pve1 is not running", "pct start 200"),
    (
        2,
        "Configuration file 'nodes/pve1/lxc/200.conf' does not exist",
        7,
        "does not exist on pve1 (or lives on another node",
        "pvesh",
    ),
    (127, "bash: line 1: pct: command not found", 7, "there is no pct on pve1", "host:"),
    (127, "sh: 1: pct: not found", 7, "there is no pct on pve1", "host:"),
    (1, "sudo: a password is required", 7, "sudo on pve1 wants a password", "NOPASSWD"),
    (127, "bash: sudo: command not found", 7, "there is no sudo on pve1", "root"),
    (
        127,
        "/usr/bin/env: '/usr/bin/python3': No such file or directory",
        9,
        "has no /usr/bin/python3 that runs",
        "agent_python:",
    ),
    (
        127,
        'lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: 1841 Failed to exec "/usr/bin/env"',
        9,
        "has no /usr/bin/python3 that runs",
        "apt-get",
    ),
    (2, "Unknown option: c\n400 unable to parse option", 7, "refused its own arguments", "vmid:"),
    (255, "400 Parameter verification failed.\nvmid: type check", 7, "refused its own arguments", "vmid:"),
    (255, "ipcc_send_rec[1] failed: Unknown error -1", 7, "must run as root", "sudo: true"),
    (None, "", 7, "ended before the answer came", "invoke status"),
    (137, "", 7, "was killed: it was stopped, or had no memory left", "dmesg"),
    (143, "", 7, "was ended: it is shut down", "pct status 200"),
    (0, "", 1, "ended with status 0 and no answer: it said nothing", ""),
    (1, "Traceback (most recent call last):\nKeyError: 'x'", 1, "status 1 and no answer: KeyError: 'x'", ""),
]


@pytest.mark.parametrize(("status", "stderr", "code", "message", "hint"), REFUSALS)
def test_each_refusal_of_pct_is_one_line_with_the_mend(
    status: int | None, stderr: str, code: int, message: str, hint: str
) -> None:
    error = pct.explain(ENDPOINT, status, stderr)
    assert (error.exit_code, message in error.message, hint in error.hint) == (code, True, True), error
    assert "\n" not in error.message


def test_the_embedded_boxs_container_that_nothing_starts_is_started_by_its_own_pct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PCTRUN_SANDBOX", "/srv/box")
    ours, idle = (dataclasses.replace(ENDPOINT, vmid=vmid, embedded=True) for vmid in (201, 202))
    assert pct.start_mend(ours) == "invoke sandbox.up"
    assert pct.start_mend(idle) == "/srv/box/bin/pct start 202"


def test_a_locale_warning_on_stderr_does_not_hide_the_reason() -> None:
    noise = "perl: warning: Setting locale failed.\nperl: warning: Falling back to a fallback locale"
    assert pct.explain(ENDPOINT, 255, f"{noise}\nCT 200 not running!").exit_code == 5
