"""`up`, `down`, `status`: quick, repeatable, plain about what is missing; for root and ordinary users."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from controller import sandbox
from controller.sandbox import interpreter, needs

PROJECT = Path(sandbox.__file__).resolve().parents[2]
SITE_PACKAGES = Path(pytest.__file__).resolve().parents[1]


def test_up_is_quick_when_it_is_up(box):
    durations: list[float] = []
    while len(durations) < 5 or (min(durations) >= 0.02 and len(durations) < 50):
        begun = time.perf_counter()
        assert sandbox.up() == box.endpoint
        durations.append(time.perf_counter() - begun)
    assert min(durations) < 0.02


def test_import_needs_no_ssh_library():
    code = "import sys, controller.sandbox; sys.exit('asyncssh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


def test_ups_at_once_start_one_server(box):
    sandbox.down()
    found = []
    threads = [threading.Thread(target=lambda: found.append(sandbox.up())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert {endpoint.port for endpoint in found} == {box.endpoint.port}


def test_status_tells_the_facts(box):
    status = sandbox.status()
    assert status.folder == box.folder
    assert (status.server_alive, status.container_running, status.realistic) == (True, True, False)
    assert status.port == box.endpoint.port
    assert status.python == box.endpoint.python
    assert status.size_bytes > 0


def test_status_of_nothing_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PCTRUN_SANDBOX", str(tmp_path / "none"))
    status = sandbox.status()
    assert (status.server_alive, status.container_running, status.size_bytes) == (False, False, 0)
    assert not sandbox.down(keep_data=False)
    assert not sandbox.cut_connections()
    assert sandbox.pct_calls() == []
    assert not (tmp_path / "none").exists()


def test_folder_follows_the_variable_else_lies_in_the_project(monkeypatch, tmp_path):
    monkeypatch.setenv("PCTRUN_SANDBOX", str(tmp_path))
    assert sandbox.sandbox_dir() == tmp_path
    monkeypatch.delenv("PCTRUN_SANDBOX")
    assert sandbox.sandbox_dir() == PROJECT / ".sandbox"


def test_missing_program_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sandbox.SandboxError) as failure:
        needs.check()
    assert "bubblewrap and tmux" in failure.value.message
    assert failure.value.hint.startswith("sudo apt-get install -y bubblewrap tmux")


def test_forbidden_user_name_spaces_are_named_with_the_switch(tmp_path):
    """A name space in which the kernel's own limit forbids further ones."""
    code = (
        "from controller.sandbox import needs, SandboxError\n"
        "try: needs.check()\n"
        "except SandboxError as e: print(e.message, '|', e.hint)"
    )
    script = f'echo 0 >/proc/sys/user/max_user_namespaces && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", script, code], cwd=PROJECT, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"unshare cannot make the case here: {done.stderr}")
    message, _, hint = done.stdout.partition(" | ")
    assert "does not let bubblewrap make a container" in message
    assert hint.strip() == "sudo sysctl user.max_user_namespaces=10000"


@pytest.mark.parametrize("name", ["missing", "not-python"])
def test_broken_interpreter_is_one_line(tmp_path, name):
    (tmp_path / "not-python").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "not-python").chmod(0o755)
    with pytest.raises(sandbox.SandboxError, match="is not a working Python"):
        interpreter.inspect(tmp_path / name)


def test_interpreter_behind_links_is_bound_at_every_station(tmp_path):
    base = Path(sys.base_prefix).resolve()
    alias = tmp_path / "alias"
    alias.symlink_to(base)
    venv = tmp_path / "venv"
    subprocess.run(
        [alias / "bin" / Path(sys.executable).resolve().name, "-m", "venv", "--without-pip", venv], check=True
    )
    executable, folders = interpreter.inspect(venv / "bin" / "python")
    assert executable == venv / "bin" / "python"
    assert venv in folders
    if not base.is_relative_to("/usr"):
        assert {alias, base} <= set(folders)


def test_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    os.chown(tmp_path, 65534, 65534)
    monkeypatch.setenv("PCTRUN_SANDBOX", str(tmp_path))
    with pytest.raises(sandbox.SandboxError, match="belongs to another user"):
        sandbox.up()


def test_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PCTRUN_SANDBOX", str(tmp_path / "file" / "box"))
    with pytest.raises(sandbox.SandboxError, match="cannot write to"):
        sandbox.up()


@pytest.fixture
def short_folder():
    folder = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


NAME = "a box's $folder é"  # a path that every level of quoting must survive


def test_environment_made_anew_is_noticed_and_down_with_the_container_mends_it(short_folder, monkeypatch):
    monkeypatch.setenv("PCTRUN_SANDBOX", str(short_folder / NAME))
    venv = short_folder / "venv"
    make = [sys.executable, "-m", "venv", "--without-pip", venv]
    subprocess.run(make, check=True)
    try:
        endpoint = sandbox.up(python=venv / "bin" / "python")
        front = short_folder / NAME / "bin" / "pct"
        run = [front, "exec", "200", "--", endpoint.python, "-c", "print(6 * 7)"]
        assert subprocess.run(run, capture_output=True, text=True).stdout == "42\n"
        shutil.rmtree(venv)
        subprocess.run(make, check=True)
        with pytest.raises(sandbox.SandboxError, match="no longer what container 200 was started with"):
            sandbox.up()
        assert sandbox.down(container=True)
        sandbox.up(python=venv / "bin" / "python")
        assert subprocess.run(run, capture_output=True, text=True).stdout == "42\n"
    finally:
        sandbox.down(keep_data=False)
    assert not (short_folder / NAME / "ct").exists()
    assert (short_folder / NAME / "keys" / "client_ed25519").exists()


AS_USER = """
import subprocess
from controller import sandbox

endpoint = sandbox.up()
front = sandbox.sandbox_dir() / "bin" / "pct"
tmux = "tmux new-session -d -s s 'sleep 600' && tmux ls | wc -l"
options = "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes"
ssh = ["ssh", "-F", "none", "-p", str(endpoint.port), "-i", str(endpoint.identity_file)]
ssh += [word for option in options for word in ("-o", option)]

def run(*words, **more):
    done = subprocess.run(words, capture_output=True, text=True, **more)
    return done.returncode, done.stdout

try:
    print([
        run(front, "exec", "200", "--", "sh", "-c", f"id -u; hostname; {tmux}; exit 9"),
        run(front, "push", "200", "/dev/stdin", "/root/x", input="pushed"),
        run(front, "exec", "200", "--", endpoint.python, "-c", "print(open('/root/x').read())"),
        run(*ssh, "root@127.0.0.1", "pct exec 200 -- id -u"),
        run(*ssh, "-tt", "root@127.0.0.1", "pct exec 200 -- tty"),
        run(front, "reboot", "200"),
        sandbox.up() == endpoint,
    ])
finally:
    sandbox.down(keep_data=False)
"""
CAN_RUN = "import asyncssh, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"


def test_ordinary_user_needs_no_root(short_folder):
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    folder = short_folder / "box"
    folder.mkdir()
    for path in (short_folder, folder):
        os.chown(path, 65534, 65534)
    env = {
        "PATH": os.environ["PATH"],
        "PCTRUN_SANDBOX": str(folder),
        "HOME": str(short_folder),
        "PYTHONPATH": f"{PROJECT}:{SITE_PACKAGES}",
    }

    def as_user(python: str, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*drop, python, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=300
        )

    able = [
        python for python in (sys.executable, "/usr/bin/python3") if as_user(python, CAN_RUN).returncode == 0
    ]
    if not able:
        pytest.skip("no interpreter that an ordinary user may run and that can import asyncssh")
    done = as_user(able[0], AS_USER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(
        [(9, "0\nct200\n1\n"), (0, ""), (0, "pushed\n"), (0, "0\n"), (0, "/dev/pts/1\n\n"), (0, ""), True]
    )
