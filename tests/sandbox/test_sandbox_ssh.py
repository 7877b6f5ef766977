"""The SSH server: who gets in, what it limits, how fast it is, and that it never ends what it has started."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import time
import uuid
from pathlib import Path

import asyncssh
import paramiko
import pytest

from controller import sandbox


def test_keys_are_for_their_owner_alone(box):
    for name in ("client_ed25519", "host_ed25519"):
        assert stat.S_IMODE((box.folder / "keys" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((box.folder / "keys").stat().st_mode) == 0o700


def test_it_listens_on_the_loopback_only(box):
    port = f":{box.endpoint.port:04X}"
    sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [own for own, _, state in sockets if own.endswith(port) and state == "0A"] == ["0100007F" + port]


def test_fingerprint_of_the_endpoint_is_the_servers(box):
    transport = paramiko.Transport((box.endpoint.host, box.endpoint.port))
    transport.start_client(timeout=10)
    assert transport.get_remote_server_key().fingerprint == box.endpoint.host_key
    transport.close()


@pytest.mark.parametrize(("user", "own_key"), [("root", False), ("admin", True)])
def test_only_the_sandboxs_key_and_root_get_in(box, user, own_key):
    key = None if own_key else paramiko.RSAKey.generate(2048)
    with pytest.raises(paramiko.AuthenticationException):
        box.connect(user, key)


def test_password_is_not_offered(box):
    transport = paramiko.Transport((box.endpoint.host, box.endpoint.port))
    transport.start_client(timeout=10)
    with pytest.raises(paramiko.BadAuthenticationType) as refusal:
        transport.auth_password("root", "x")
    assert refusal.value.allowed_types == ["publickey"]
    transport.close()


def test_plain_ssh_client_works(box, tmp_path):
    if shutil.which("ssh") is None:
        pytest.skip("no ssh client on this machine")
    known = tmp_path / "known_hosts"
    known.write_text(box.endpoint.known_hosts_line + "\n")
    options = [
        "-F",
        "none",
        "-o",
        f"UserKnownHostsFile={known}",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "BatchMode=yes",
    ]
    where = ["-p", str(box.endpoint.port), "-i", str(box.endpoint.identity_file), "root@127.0.0.1"]
    done = subprocess.run(
        ["ssh", *options, *where, "pct exec 200 -- sh -c 'echo hi; exit 3'"], capture_output=True
    )
    assert (done.returncode, done.stdout) == (3, b"hi\n")


def test_login_is_a_root_login_with_pct_first_on_the_path(box, ssh):
    env = dict(line.split("=", 1) for line in ssh("env").out.decode().splitlines())
    assert env["PATH"].split(":")[0] == f"{box.folder}/bin"
    assert (env["USER"], env["LOGNAME"], env["HOME"], env["SHELL"]) == ("root", "root", "/root", "/bin/bash")
    assert env["SSH_CONNECTION"].endswith(f"127.0.0.1 {box.endpoint.port}")
    assert "LANG" not in env


def test_lang_of_the_settings_stands_for_the_hosts_default_locale(box, ssh):
    settings = box.folder / "settings"
    before = settings.read_text()
    settings.write_text(before + "lang: C.UTF-8\n")
    try:
        assert ssh("pct exec 200 -- echo é").out.decode() == "é\n"
    finally:
        settings.write_text(before)


def test_exit_signal_is_reported(box):
    async def run() -> asyncssh.SSHCompletedProcess:
        async with connect(box) as connection:
            return await connection.run("kill -9 $$")

    done = asyncio.run(run())
    assert done.exit_signal is not None
    assert done.exit_signal[0] == "KILL"


def connect(box):
    host_key = asyncssh.import_public_key(" ".join(box.endpoint.known_hosts_line.split()[1:]))
    return asyncssh.connect(
        box.endpoint.host,
        box.endpoint.port,
        username="root",
        client_keys=[str(box.endpoint.identity_file)],
        known_hosts=([host_key], [], []),
        config=None,
    )


def test_ssh_signal_request_does_not_reach_the_container(box):
    async def run() -> str:
        async with connect(box) as connection:
            process = await connection.create_process("pct exec 200 -- sh -c 'echo up; read x; echo got $x'")
            await process.stdout.readline()
            process.send_signal("TERM")
            process.stdin.write("word\n")
            return str(await process.stdout.read())

    assert asyncio.run(run()) == "got word\n"


def test_eleventh_session_of_a_connection_is_refused(box):
    client = box.connect()
    transport = client.get_transport()
    channels = [transport.open_session(timeout=10) for _ in range(10)]
    with pytest.raises(paramiko.ChannelException):
        transport.open_session(timeout=10)
    channels.pop().close()
    box.wait_for(lambda: opens(transport), "a closed session makes room")
    client.close()


def opens(transport: paramiko.Transport) -> bool:
    try:
        transport.open_session(timeout=10).close()
    except paramiko.ChannelException:
        return False
    return True


def test_keepalive_is_answered(connection):
    begun = time.monotonic()
    connection.get_transport().global_request("keepalive@openssh.com", wait=True)
    assert time.monotonic() - begun < 20
    assert connection.get_transport().is_active()


@pytest.mark.parametrize("how", ["channel", "connection", "network"])
def test_process_outlives_the_client(box, how):
    marker = f"sleep 600.{uuid.uuid4().int % 10**6}"
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.exec_command(f"pct exec 200 -- {marker}")
    box.wait_for(lambda: box.runs(marker), "the process runs")
    if how == "channel":
        channel.close()
    elif how == "connection":
        client.close()
    else:
        assert sandbox.cut_connections()
        box.wait_for(lambda: not client.get_transport().is_active(), "the connection breaks")
        assert sandbox.status().server_alive
    client.close()
    time.sleep(0.3)  # the time in which a server that kills would kill
    assert box.runs(marker)
    box.inside(f"pkill -x -f '{marker}'")


def test_reader_sees_the_end_of_its_input_when_the_client_vanishes(box):
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.exec_command("pct exec 200 -- sh -c 'cat >/root/half; echo ended >/root/ended'")
    channel.sendall(b"half")
    box.wait_for(lambda: box.inside("cat /root/half 2>/dev/null || true") == "half", "the half arrives")
    sandbox.cut_connections()
    box.wait_for(lambda: "ended" in box.inside("ls /root"), "cat ends")
    client.close()


def test_server_does_not_hoard_what_a_client_does_not_read(box):
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.exec_command("pct exec 200 -- sh -c 'yes | head -c 400000000; echo done >/root/yes-done'")
    server = sandbox.status().server_pid
    box.wait_for(lambda: channel.in_buffer._buffer.__len__() > 1_000_000, "the window fills")
    time.sleep(0.3)
    resident = int(Path(f"/proc/{server}/statm").read_text().split()[1]) * resource.getpagesize()
    assert resident < 120 << 20
    assert "yes-done" not in box.inside("ls /root")
    client.close()


def test_server_does_not_hoard_what_a_child_does_not_read(box):
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.exec_command("pct exec 200 -- sleep 600.5")
    channel.settimeout(0.7)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 100 << 20:
            sent += channel.send(bytes(32768))
    assert sent < 20 << 20
    client.close()
    box.inside("pkill -x -f 'sleep 600.5'")


def test_100_mib_go_in_and_20_mb_come_out_fast(ssh):
    data = bytes(100 << 20)
    begun = time.monotonic()
    assert ssh("pct exec 200 -- wc -c", stdin=data).out.strip() == str(len(data)).encode()
    up = time.monotonic() - begun
    begun = time.monotonic()
    assert len(ssh("pct exec 200 -- head -c 20000000 /dev/zero").out) == 20_000_000
    down = time.monotonic() - begun
    assert (up < 60, down < 20) == (True, True), f"{up:.1f} s up, {down:.1f} s down"


def test_terminal_is_one_of_the_container_and_lines_end_in_cr_cr_lf(box):
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.get_pty("xterm", 90, 33)
    channel.exec_command("pct exec 200 -- sh -c 'tty; stty size; echo err >&2; exit 4'")
    with channel.makefile("rb") as out:
        assert out.read() == b"/dev/pts/0\r\r\n33 90\r\r\nerr\r\r\n"
    assert channel.recv_exit_status() == 4
    client.close()


def test_terminal_passes_keys_and_sizes(box):
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.settimeout(20)
    channel.get_pty("xterm", 80, 24)
    channel.exec_command("pct exec 200 -- sh -c 'echo ready; read x; stty size; echo armed; read y'")
    expect(channel, b"ready")
    channel.resize_pty(101, 42)
    box.wait_for(lambda: box.inside("stty -F /dev/pts/0 size") == "42 101", "the size arrives")
    channel.sendall(b"\r")
    expect(channel, b"42 101\r\r\narmed")
    channel.sendall(b"\x03")
    assert channel.recv_exit_status() == 130
    client.close()


def expect(channel: paramiko.Channel, what: bytes) -> None:
    seen = b""
    while what not in seen:
        piece = channel.recv(4096)
        assert piece, seen
        seen += piece


def test_closing_a_terminal_hangs_up_its_process(box):
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.get_pty()
    channel.exec_command("pct exec 200 -- sleep 600.8")
    box.wait_for(lambda: box.runs("sleep 600.8"), "it runs")
    channel.close()
    box.wait_for(lambda: not box.runs("sleep 600.8"), "it is hung up")
    client.close()


def test_tmux_starts_without_a_terminal_lives_on_and_can_be_attached(box):
    client = box.connect()
    _, out, _ = client.exec_command(
        "pct exec 200 -- tmux new-session -d -s life 'echo in-the-pane; exec sleep 600.9'"
    )
    assert out.channel.recv_exit_status() == 0
    client.close()
    assert box.pct("exec", "200", "--", "tmux", "has-session", "-t", "life").code == 0
    assert box.inside("ps -o ppid= -p $(pgrep -f 'tmux new-session')").strip() == "1"
    client = box.connect()
    channel = client.get_transport().open_session()
    channel.settimeout(20)
    channel.get_pty("xterm", 100, 30)
    channel.exec_command("pct exec 200 -- tmux attach -t life")
    expect(channel, b"in-the-pane")
    channel.sendall(b"\x02d")
    expect(channel, b"detached")
    assert channel.recv_exit_status() == 0
    client.close()
    box.inside("tmux kill-session -t life")


def test_server_goes_and_comes_back_on_its_port_with_its_key_and_the_container_runs_on(box):
    marker = "sleep 601.1"
    box.inside(f"{marker} >/dev/null 2>&1 </dev/null &")
    before = sandbox.status()
    assert sandbox.down()
    assert not sandbox.down()
    with pytest.raises(OSError):
        socket.create_connection((box.endpoint.host, box.endpoint.port), timeout=2)
    assert not sandbox.status().server_alive
    assert sandbox.up() == box.endpoint
    assert sandbox.status().container_pid == before.container_pid
    assert box.runs(marker)
    box.inside(f"pkill -x -f '{marker}'")


def test_taken_port_is_replaced_and_recorded(box):
    sandbox.down()
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((box.endpoint.host, box.endpoint.port))
        squatter.listen()
        moved = sandbox.up()
    assert moved.port != box.endpoint.port
    assert moved.host_key == box.endpoint.host_key
    box.endpoint = moved
    box.connect().close()


def test_killed_server_is_noticed_and_replaced(box):
    server = sandbox.status().server_pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    box.wait_for(lambda: not sandbox.status().server_alive, "its end is noticed")
    assert sandbox.up().port == box.endpoint.port
    box.connect().close()


def test_server_keeps_no_descriptor_and_no_zombie_of_past_sessions(box, ssh):
    server = sandbox.status().server_pid
    ssh("true")

    def held() -> int:
        return len(list(Path(f"/proc/{server}/fd").iterdir()))

    before = held()
    for line in ("pct exec 200 -- cat", "nosuch", "echo " + "x" * 140_000, "kill -9 $$"):
        for _ in range(5):
            ssh(line, stdin=b"data")
    client = box.connect()
    for _ in range(5):
        channel = client.get_transport().open_session()
        channel.get_pty()
        channel.exec_command("pct exec 200 -- sleep 600.6")
    client.close()
    box.wait_for(lambda: not box.runs("sleep 600.6"), "the terminals' processes are hung up")
    box.wait_for(lambda: held() <= before, "descriptors are closed")

    def children() -> str:
        listing = ["ps", "--ppid", str(server), "-o", "stat="]
        return subprocess.run(listing, capture_output=True, text=True).stdout.strip()

    box.wait_for(lambda: children() == "", "all children are gone, no zombie among them")


def test_server_has_had_nothing_to_complain_about(box):
    log = (box.folder / "server.log").read_text()
    assert not log, log
