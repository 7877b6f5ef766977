"""The connection: known hosts only, ends when the peer is gone, loses and slows nothing."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import asyncssh
import paramiko
import pytest

from controller import hostkeys, sandbox
from controller.deadline import Deadline
from controller.endpoint import Endpoint
from controller.errors import ConnectionLost, HostKeyRefused, LoginRefused, Unreachable
from controller.transport import Link
from tests.faults.table import fault

from .conftest import Proxy, run

MIB = 1 << 20
QUICK = Deadline(connect=10, idle=2)
SLACK_S = 15  # what a busy machine may add; the other limits are minutes


def drop(data: bytes) -> None:
    pass


@pytest.fixture
def link(endpoint: Endpoint):
    made = Link(endpoint)
    yield made
    made.close()


def test_status_and_both_outputs_come_back(link: Link) -> None:
    assert run(link, "echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")


def test_one_connection_serves_many_commands(link: Link) -> None:
    assert [run(link, f"exit {code}")[0] for code in range(15)] == list(range(15))


def test_megabytes_both_ways_at_once_do_not_deadlock(link: Link) -> None:
    feed = (bytes([n % 251]) * MIB for n in range(12))
    wanted = b"".join(bytes([n % 251]) * MIB for n in range(12))
    status, out, err = run(link, "tee /dev/stderr", feed=feed)
    assert status == 0
    assert out == wanted
    assert err == wanted


def test_a_big_upload_is_linear_in_time(link: Link) -> None:
    """64 MiB of bytes in one piece take half a minute through Paramiko's sendall; sliced, a second."""
    began = time.monotonic()
    assert run(link, "wc -c", feed=[bytes(64 * MIB)])[1].split() == [b"67108864"]
    assert time.monotonic() - began < 25


def test_threads_share_a_link_and_never_each_others_bytes(link: Link) -> None:
    """`doctor` asks the host and the container at once."""
    size, answers = 2 * MIB, {}

    def ask(letter: str) -> None:
        answers[letter] = run(link, f"cat; printf {letter}", feed=[letter.encode() * size])

    threads = [threading.Thread(target=ask, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {letter: (0, letter.encode() * (size + 1), b"") for letter in "abc"}


def test_a_command_that_reads_nothing_is_no_error(link: Link) -> None:
    assert run(link, "exit 3", feed=[bytes(8 * MIB)])[0] == 3


def test_an_error_of_the_feed_is_raised_here(link: Link) -> None:
    def feed():
        yield b"first"
        raise LookupError("the source vanished")

    with pytest.raises(LookupError, match="vanished"):
        run(link, "cat", feed=feed())


def test_a_child_that_holds_the_pipes_does_not_keep_us(link: Link) -> None:
    seen = bytearray()
    began = time.monotonic()
    link.run(
        "sleep 60 & echo $!; exit 0", on_stdout=seen.extend, on_stderr=drop, finished=lambda: b"\n" in seen
    )
    assert time.monotonic() - began < 50
    os.kill(int(seen), signal.SIGKILL)


def test_the_total_deadline_ends_a_call(link: Link) -> None:
    with pytest.raises(ConnectionLost, match=r"no answer within 2 s"):
        run(link, "sleep 60", deadline=Deadline(total=2))


@fault(
    "unknown host key",
    promised="nothing is sent or recorded",
    seen="exit 7 with its fingerprint and `ssh-keyscan -p`",
    part="way",
)
def test_an_unknown_host_key_is_refused_with_the_mend(endpoint: Endpoint, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    with pytest.raises(HostKeyRefused) as caught:
        Link(Endpoint(**{**vars(endpoint), "host_key": None, "known_hosts": str(known)}))
    assert caught.value.exit_code == 7
    assert f"ssh-keyscan -p {endpoint.port} 127.0.0.1" in caught.value.hint
    assert endpoint.host_key is not None
    assert endpoint.host_key in caught.value.message
    assert not known.exists()


def test_a_key_in_known_hosts_is_accepted(
    endpoint: Endpoint, embedded: sandbox.Endpoint, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(embedded.known_hosts_line + "\n")
    link = Link(Endpoint(**{**vars(endpoint), "host_key": None, "known_hosts": str(known)}))
    assert link.alive
    link.close()


def test_a_changed_host_key_is_refused_and_names_both_keys(endpoint: Endpoint, tmp_path: Path) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().split()
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{endpoint.port} {other[0]} {other[1]}\n")
    with pytest.raises(HostKeyRefused, match="has changed") as caught:
        Link(Endpoint(**{**vars(endpoint), "host_key": None, "known_hosts": str(known)}))
    assert endpoint.host_key is not None
    assert endpoint.host_key in caught.value.message
    assert "ssh-keygen -R" in caught.value.hint


def test_a_pin_that_differs_is_refused_whatever_known_hosts_says(
    endpoint: Endpoint, embedded: sandbox.Endpoint, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(embedded.known_hosts_line + "\n")
    pin = "SHA256:" + "A" * 43
    with pytest.raises(HostKeyRefused, match="is not the pinned one"):
        Link(Endpoint(**{**vars(endpoint), "host_key": pin, "known_hosts": str(known)}))


def test_fingerprints_are_those_of_ssh_keygen(embedded: sandbox.Endpoint) -> None:
    kind, data = embedded.known_hosts_line.split()[1:3]
    key = paramiko.hostkeys.HostKeyEntry.from_line(f"host {kind} {data}").key
    assert hostkeys.fingerprint(key.asbytes()) == embedded.host_key


def test_a_refused_login_names_the_user_and_the_mend(endpoint: Endpoint, tmp_path: Path) -> None:
    key = tmp_path / "stranger"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(key))
    with pytest.raises(LoginRefused, match="refused the login of root"):
        Link(Endpoint(**{**vars(endpoint), "identity_file": str(key)}))


def test_a_missing_key_file_is_said_before_anything_is_tried(endpoint: Endpoint) -> None:
    with pytest.raises(LoginRefused, match="no key file"):
        Link(Endpoint(**{**vars(endpoint), "identity_file": "/nowhere/key"}))


def test_nobody_listening_is_unreachable(endpoint: Endpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unreachable, match="refuses the connection"):
        Link(Endpoint(**{**vars(endpoint), "port": port}))


def test_an_unknown_name_is_unreachable(endpoint: Endpoint) -> None:
    with pytest.raises(Unreachable, match="no such host name"):
        Link(Endpoint(**{**vars(endpoint), "host": "no-such-host.invalid"}))


def test_a_peer_that_accepts_and_says_nothing_is_unreachable_in_time(endpoint: Endpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        with pytest.raises(Unreachable):
            Link(Endpoint(**{**vars(endpoint), "port": listener.getsockname()[1]}), Deadline(connect=1))
    assert time.monotonic() - began < 1 + SLACK_S


def frozen_after(proxy: Proxy, act: Callable[[], object]) -> float:
    """Seconds from the freeze to the clean failure."""
    frozen_at: list[float] = []

    def freeze() -> None:
        proxy.frozen.set()
        frozen_at.append(time.monotonic())

    timer = threading.Timer(0.7, freeze)
    timer.start()
    with pytest.raises(ConnectionLost, match=r"no sign of life|opens no channel"):
        act()
    timer.join()
    return time.monotonic() - frozen_at[0]


def test_a_frozen_peer_fails_within_the_idle_deadline(endpoint: Endpoint, proxy: Proxy) -> None:
    link = Link(Endpoint(**{**vars(endpoint), "port": proxy.port}), QUICK)
    assert frozen_after(proxy, lambda: run(link, "sleep 60", deadline=QUICK)) < QUICK.idle + SLACK_S
    assert not link.alive


def test_a_peer_that_freezes_in_an_upload_fails_as_soon(endpoint: Endpoint, proxy: Proxy) -> None:
    link = Link(Endpoint(**{**vars(endpoint), "port": proxy.port}), QUICK)
    endless = itertools.repeat(bytes(MIB // 4))
    assert (
        frozen_after(proxy, lambda: run(link, "cat >/dev/null", feed=endless, deadline=QUICK))
        < QUICK.idle + SLACK_S
    )


def test_a_frozen_peer_opens_no_channel_and_we_do_not_wait_an_hour(endpoint: Endpoint, proxy: Proxy) -> None:
    link = Link(Endpoint(**{**vars(endpoint), "port": proxy.port}), Deadline(connect=10, idle=60))
    proxy.frozen.set()
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="opens no channel"):
        run(link, "true", deadline=Deadline(connect=2, idle=60))
    assert time.monotonic() - began < 2 + SLACK_S


def test_a_peer_that_freezes_before_it_answers_the_exec_request_fails_too(
    endpoint: Endpoint, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paramiko waits for that answer without any limit."""
    link = Link(Endpoint(**{**vars(endpoint), "port": proxy.port}), QUICK)
    ask = paramiko.Channel.exec_command

    def freeze_then_ask(channel: paramiko.Channel, command: str) -> None:
        proxy.frozen.set()
        ask(channel, command)

    monkeypatch.setattr(paramiko.Channel, "exec_command", freeze_then_ask)
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="no sign of life"):
        run(link, "true", deadline=QUICK)
    assert time.monotonic() - began < QUICK.idle + SLACK_S


@fault(
    "the SSH server process suspended",
    promised="a peer without a word is told from a silent command",
    seen="`no sign of life`",
    part="way",
)
def test_a_stopped_server_process_is_a_frozen_peer(endpoint: Endpoint) -> None:
    pid = sandbox.status().server_pid
    assert pid is not None
    link = Link(endpoint, QUICK)
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGSTOP))
    timer.start()
    try:
        with pytest.raises(ConnectionLost, match="no sign of life"):
            run(link, "sleep 60", deadline=QUICK)
    finally:
        timer.join()
        os.kill(pid, signal.SIGCONT)


def test_a_cut_connection_is_lost_at_once(endpoint: Endpoint, proxy: Proxy) -> None:
    link = Link(Endpoint(**{**vars(endpoint), "port": proxy.port}))
    timer = threading.Timer(0.5, proxy.cut)
    timer.start()
    began = time.monotonic()
    with pytest.raises(ConnectionLost):
        run(link, "sleep 60")
    assert time.monotonic() - began < SLACK_S


@fault(
    "a command that says nothing for long",
    promised="silence of a living host is not death",
    seen="it ends as it would, `here`",
    part="way",
)
def test_silence_of_a_living_peer_is_not_death(endpoint: Endpoint) -> None:
    link = Link(endpoint, Deadline(idle=3))
    assert run(link, "sleep 7; echo here", deadline=Deadline(idle=3)) == (0, b"here\n", b"")
    link.close()


def test_small_packets_leave_at_once(link: Link) -> None:
    """With Nagle's algorithm key exchange and login wait 40 ms each for an acknowledgement."""
    assert link._transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
