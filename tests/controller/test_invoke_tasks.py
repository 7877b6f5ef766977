"""Whole commands as a person types them: what stands on stdout, on stderr, and in the exit code."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controller import embedded as embedded_box
from controller import sandbox
from controller.execution import execute
from controller.inventory import Box
from controller.tasks import namespace

PROJECT = Path(__file__).resolve().parents[2]
INVENTORY = """
default: sandbox
boxes:
  sandbox: {sandbox: true, vmid: 200, recipe: smollm2-135m}
  twin: {sandbox: true, vmid: 200, recipe: smollm2-135m}
  gone: {host: 127.0.0.1, port: 1, vmid: 200, recipe: smollm2-135m}
"""

Invoke = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def line(tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return lambda *words: [sys.executable, "-m", "invoke", *words]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PCTRUN_INVENTORY": str(tmp_path / "inventory.yaml")}


@pytest.fixture
def invoke(line: Callable[..., list[str]], environment: dict[str, str]) -> Invoke:
    def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        given = {"env": environment, "cwd": PROJECT, "capture_output": True, "text": True, "timeout": 600}
        return subprocess.run(line(*words), check=False, **{**given, **options})

    return run


def test_the_list_is_a_front_page(invoke: Invoke) -> None:
    listed = invoke("--list")
    lines = [line for line in listed.stdout.splitlines()[2:] if line.strip()]
    assert [line.split()[0] for line in lines] == [
        *("abort", "attach", "boxes", "deploy", "doctor", "exec", "fetch", "logs", "plot"),
        *("restart", "rollback", "status", "unlock", "wait", "watch"),
        *("env.build", "env.diff", "env.list", "env.prune", "env.use"),
        *("runs.diff", "runs.list", "runs.pin", "runs.prune", "runs.show"),
        *("sandbox.down", "sandbox.model", "sandbox.status", "sandbox.up"),
    ]
    assert all(len(line) <= 80 and line.endswith(".") for line in lines), listed.stdout


def test_every_option_of_every_task_has_help() -> None:
    commands = copy.deepcopy(namespace)  # Invoke takes the help out of the tasks that it parses for
    for name in commands.task_names:
        made = commands[name]
        for argument in made.get_arguments():
            assert argument.help, f"{name} --{argument.name} has no help"
            assert all(len(each) > 1 for each in argument.names), f"{name} -{argument.name} has no long name"
        assert {"json"} <= {name for argument in made.get_arguments() for name in argument.names}, name


def test_listing_costs_little_more_than_invoke_itself(invoke: Invoke) -> None:
    def cheapest(*words: str) -> float:
        """In time of the processor: other work on the cores is not ours."""
        costs = []
        for _ in range(3):
            before = os.times()
            invoke(*words)
            after = os.times()
            costs.append(after.children_user + after.children_system)
            costs[-1] -= before.children_user + before.children_system
        return min(costs)

    assert cheapest("--list") - cheapest("--version") < 0.35


@pytest.mark.parametrize("words", ["abort --box", "-R restart --set --json", "-R abort --box gone --box"])
def test_an_option_that_lacks_its_value_is_not_one_that_was_left_out(invoke: Invoke, words: str) -> None:
    """`abort --box $EMPTY` must not stop the run of the default box."""
    done = invoke(*words.split())
    assert done.returncode == 1
    assert "wants a value" in done.stderr + done.stdout


def test_dry_runs_touch_nothing(invoke: Invoke, environment: dict[str, str], tmp_path: Path) -> None:
    nowhere = tmp_path / "no-sandbox-yet"
    environment["PCTRUN_SANDBOX"] = str(nowhere)
    words = ["deploy", "restart", "--fresh-cache", "status", "abort", "logs", "exec", "ls", "attach", "wait"]
    done = invoke("-R", *words, "sandbox.up", "sandbox.down", "sandbox.model", "status", "--box", "gone")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nothing was") == 12
    assert not nowhere.exists()


def test_status_prints_a_screen_and_exits_with_the_verdict(
    invoke: Invoke, embedded: sandbox.Endpoint
) -> None:
    done = invoke("status")
    assert done.stdout.startswith("sandbox/200  NOT-RUNNING  no run yet\n")
    assert "no NVIDIA GPU in this container" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.returncode == 5


def test_json_is_one_document_with_a_schema(invoke: Invoke, embedded: sandbox.Endpoint) -> None:
    document = json.loads(invoke("status", "--json").stdout)
    assert (document["schema"], document["task"], document["exit_code"]) == (1, "status", 5)
    [box] = document["boxes"]
    assert (box["box"], box["verdict"], box["exit_code"]) == ("sandbox", "not-running", 5)
    assert {"since", "reasons", "evidence", "snapshot"} <= box.keys()


def test_an_error_is_json_too(invoke: Invoke, embedded: sandbox.Endpoint) -> None:
    done = invoke("logs", "--run", "r-9999", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 5
    assert document["boxes"][0]["error"]["kind"] == "no-run"
    done = invoke("status", "--box", "lap", "--json")
    assert json.loads(done.stdout)["error"]["kind"] == "usage"
    assert done.returncode == 1


def test_an_unreachable_host_is_one_line_without_a_traceback(invoke: Invoke) -> None:
    done = invoke("deploy", "--box", "gone")
    assert done.returncode == 7
    assert done.stderr.startswith("error: 127.0.0.1:1 refuses the connection\nhint: ")
    assert "Traceback" not in done.stderr


def test_a_port_that_speaks_no_ssh_is_one_line_too(invoke: Invoke, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        port = listener.getsockname()[1]
        (tmp_path / "inventory.yaml").write_text(INVENTORY.replace("port: 1", f"port: {port}"))
        done = invoke("status", "--box", "gone")
    assert (done.returncode, done.stderr) == (7, "")
    assert f"cannot reach 127.0.0.1:{port}" in done.stdout


def test_a_broken_inventory_is_one_line_with_its_place(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(INVENTORY.replace("recipe", "recipee", 1))
    done = invoke("status")
    said = "error: inventory.yaml:4: unknown key 'recipee' in box 'sandbox'; did you mean 'recipe'?\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_exec_passes_exact_arguments_outputs_and_code(invoke: Invoke, embedded: sandbox.Endpoint) -> None:
    done = invoke("exec", "sh -c 'printf %s \"$1\"; echo err >&2; exit 9' sh", "--arg=-x $HOME é")
    assert (done.stdout, done.stderr, done.returncode) == ("-x $HOME é", "err\n", 9)


def test_exec_takes_the_words_behind_two_dashes(invoke: Invoke, embedded: sandbox.Endpoint) -> None:
    words = ["--box", "a  b", "", "--", "$HOME", "-L"]
    for begin in ("printf --arg=%s| --", "--cwd /opt --box=sandbox -- printf %s|", "-- printf %s|"):
        done = invoke("exec", *begin.split(), *words)
        assert (done.stdout, done.returncode) == ("".join(f"{word}|" for word in words), 0), done.stderr


def test_exec_streams_our_stdin(invoke: Invoke, embedded: sandbox.Endpoint) -> None:
    assert invoke("exec", "wc -c", "--stdin", input="x" * 300_000).stdout.strip() == "300000"


def test_a_reader_that_has_had_enough_is_no_error(
    line: Callable[..., list[str]], environment: dict[str, str], embedded: sandbox.Endpoint
) -> None:
    child = subprocess.Popen(
        line("exec", "seq 3000000"),
        env=environment,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b"1\n"
    child.stdout.close()
    assert child.wait(60) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


def test_a_reader_that_leaves_does_not_change_the_verdict(
    line: Callable[..., list[str]], environment: dict[str, str], tmp_path: Path
) -> None:
    """`invoke status | true` in a script with pipefail: a box that is down must not count as fine."""
    reader, writer = os.pipe()
    os.close(reader)
    down = {**environment, "PCTRUN_SANDBOX": str(tmp_path)}
    (tmp_path / "down-by-hand").touch()
    done = subprocess.run(
        line("status"),
        stdout=writer,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=down,
        cwd=PROJECT,
        timeout=300,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, b"")


def interrupted(child: subprocess.Popen[str]) -> str:
    """What it says after Ctrl-C; it must go quickly, with 130."""
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=300)[1]
    assert child.returncode == 130
    assert time.monotonic() - began < 30
    assert "Traceback" not in said
    return said


def test_an_interrupt_ends_a_command_and_says_so(
    line: Callable[..., list[str]], environment: dict[str, str], embedded: sandbox.Endpoint
) -> None:
    child = subprocess.Popen(
        line("exec", "sh -c 'echo started; sleep 60'"),
        env=environment,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    assert "note: interrupted, only this side stopped: the agent ends the command" in interrupted(child)


def test_an_interrupt_does_not_wait_for_boxes_that_wait(
    line: Callable[..., list[str]], environment: dict[str, str], box: Box
) -> None:
    run_dir = f"{box.roots.lib}/runs/r-7100"
    script = f"mkdir -p {run_dir} && echo '{{\"created\": 9999999999}}' > {run_dir}/run.json"
    assert execute(box, ["sh", "-c", script]).code == 0
    calls = sandbox.sandbox_dir() / "calls.log"
    before = calls.read_bytes().count(b"\n")
    child = subprocess.Popen(
        line("wait", "--run", "r-7100", "--box", "sandbox", "--box", "twin"),
        env=environment,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while calls.read_bytes().count(b"\n") < before + 2:  # each box has begun to look
        assert child.poll() is None
        time.sleep(0.05)
    assert "note: interrupted, only this side stopped: a run in the container goes on" in interrupted(child)
    assert execute(box, ["rm", "-r", run_dir]).code == 0


def test_wait_ends_at_once_when_the_verdict_can_no_longer_come(
    invoke: Invoke, embedded: sandbox.Endpoint
) -> None:
    began = time.monotonic()
    done = invoke("wait", "--until", "healthy", "--timeout", "60")
    assert (done.returncode, done.stdout) == (5, "sandbox/200  NOT-RUNNING  no run yet\n")
    assert time.monotonic() - began < 50
    assert invoke("wait", "--until", "finished,not-running").returncode == 0
    assert "no verdict is called 'done'" in invoke("wait", "--until", "healthy,done").stderr


def test_wait_times_out_on_what_may_still_come(invoke: Invoke) -> None:
    done = invoke("wait", "--until", "healthy", "--timeout", "1", "--box", "gone")
    assert done.returncode == 10
    assert done.stderr.splitlines()[-3].startswith(
        "error: gone/200 is not healthy after 1 s: gone/200  UNREACHABLE"
    )


def test_boxes_lists_the_inventory_without_reaching_for_it(invoke: Invoke) -> None:
    done = invoke("boxes")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["*", "sandbox"],
        ["twin", "sandbox,"],
        ["gone", "127.0.0.1,"],
    ]


def test_sandbox_down_and_up_by_hand(invoke: Invoke, embedded: sandbox.Endpoint) -> None:
    runs_on = "container 200 runs on with what runs in it; invoke sandbox.down --container stops it"
    assert invoke("sandbox.down").stdout == f"down: {runs_on}\n"
    try:
        assert invoke("sandbox.status").returncode == 5
        done = invoke("status")
        assert (done.returncode, done.stdout.split()[1]) == (7, "UNREACHABLE")
        assert "invoke sandbox.up" in done.stdout
        assert invoke("sandbox.up").returncode == 0
        assert invoke("status").returncode == 5
    finally:
        embedded_box.up(revive=True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("wait", "--timeout", "abc"), "--timeout wants a number of seconds, 0 or more, not 'abc'"),
        (("wait", "--timeout", "nan"), "--timeout wants a number of seconds, 0 or more, not 'nan'"),
        (("exec", "true", "--timeout=-1"), "--timeout wants a number of seconds, 0 or more, not '-1'"),
        (("logs", "--lines", "1.5"), "--lines wants a whole number of 0 or more, not '1.5'"),
        (("runs.prune",), "--keep wants a whole number of 0 or more"),
    ],
)
def test_a_wrong_number_is_one_line(invoke: Invoke, words: tuple[str, ...], complaint: str) -> None:
    done = invoke(*words)
    assert (done.returncode, done.stderr) == (1, f"error: {complaint}\n")
    document = json.loads(invoke("-R", *words, "--json").stdout)
    assert (document["exit_code"], document["error"]["message"]) == (1, complaint)


def test_a_full_disk_under_our_output_is_one_line(invoke: Invoke) -> None:
    with open("/dev/full", "w") as full:
        done = invoke("boxes", "--json", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_an_empty_one(
    line: Callable[..., list[str]], environment: dict[str, str], embedded: sandbox.Endpoint, closed: int
) -> None:
    done = subprocess.run(
        line("exec", "sh -c 'cat; echo out; echo err >&2; exit 3'", "--stdin"),
        env=environment,
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.close(closed),
        timeout=300,
    )
    assert done.returncode == 3
    assert (done.stdout, done.stderr) == ("" if closed == 1 else "out\n", "" if closed == 2 else "err\n")


def test_stdin_may_be_non_blocking(
    line: Callable[..., list[str]], environment: dict[str, str], embedded: sandbox.Endpoint
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    child = subprocess.Popen(
        line("exec", "sh -c 'echo up; cat'", "--stdin"),
        env=environment,
        cwd=PROJECT,
        stdin=reader,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(reader)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    os.write(writer, b"late")
    os.close(writer)
    assert child.communicate(timeout=300)[0] == "late"
    assert child.returncode == 0


def test_an_interrupt_while_python_still_imports_says_so_too(
    line: Callable[..., list[str]], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "statistics.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        line("boxes"),
        env={**environment, "PYTHONPATH": str(tmp_path)},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (130, "note: interrupted before anything was done\n")


def test_the_controller_is_not_compiled_at_every_start(
    line: Callable[..., list[str]], environment: dict[str, str], tmp_path: Path
) -> None:
    kept = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(line("boxes"), env={**kept, "PYTHONPYCACHEPREFIX": str(tmp_path)}, cwd=PROJECT, check=True)
    assert list(tmp_path.rglob("controller/inventory.*.pyc"))
