"""known_hosts as OpenSSH reads it: names, ports, hashes, patterns, markers, damage; and in no time."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import asyncssh
import paramiko
import pytest

from controller import hostkeys
from controller.errors import HostKeyRefused


def public_key() -> str:
    """`ssh-ed25519 AAAA…`"""
    return " ".join(asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().split()[:2])


KEY, OTHER = public_key(), public_key()


def shown(line: str) -> paramiko.PKey:
    key = paramiko.hostkeys.HostKeyEntry.from_line(f"host {line}").key
    assert isinstance(key, paramiko.PKey)
    return key


def ask(text: str, folder: Path, *, host: str = "pve1", port: int = 22, key: str = KEY) -> None:
    """Raises HostKeyRefused unless a host that shows `key` is known by this text."""
    known = folder / "known_hosts"
    known.write_text(text)
    policy = hostkeys.Policy(host, port, known_hosts=str(known), pin=None)
    policy.missing_host_key(paramiko.SSHClient(), policy.name, shown(key))


@pytest.mark.parametrize(
    ("names", "host", "port"),
    [
        ("pve1", "pve1", 22),
        ("a,pve1,10.0.0.5", "10.0.0.5", 22),
        ("[pve1]:2222", "pve1", 2222),
        ("PVE1", "pve1", 22),
        ("*.example.org", "pve1.example.org", 22),
        ("pve?", "pve1", 22),
        ("[*.example.org]:2222", "pve1.example.org", 2222),
        ("!pve2,pve*", "pve1", 22),
    ],
)
def test_a_host_is_known_by_its_names(names: str, host: str, port: int, tmp_path: Path) -> None:
    ask(f"# a comment\n\n{names} {KEY} and a comment\n", tmp_path, host=host, port=port)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "pve1", 22),
        ("pve1 KEY\n", "pve1", 2222),
        ("[pve1]:2222 KEY\n", "pve1", 22),
        ("!pve1,pve* KEY\n", "pve1", 22),
        ("pve1.example.org KEY\n", "pve1", 22),
        ("@cert-authority pve1 KEY\n", "pve1", 22),
        ("pve1 KEY\n@revoked * KEY\n", "pve1", 22),
        ("pve1 ssh-ed25519 damaged!\n", "pve1", 22),
        ("|1|no|hash|here x y\n", "pve1", 22),
    ],
)
def test_a_host_is_not_known(text: str, host: str, port: int, tmp_path: Path) -> None:
    with pytest.raises(HostKeyRefused, match="is not known: it shows SHA256:"):
        ask(text.replace("KEY", KEY), tmp_path, host=host, port=port)


def test_any_of_several_keys_is_good_and_another_one_is_a_change(tmp_path: Path) -> None:
    text = f"pve1 {OTHER}\nbroken\npve1 {KEY}\n"
    ask(text, tmp_path)
    ask(text, tmp_path, key=OTHER)
    with pytest.raises(HostKeyRefused, match="host key of pve1 has changed"):
        ask(text, tmp_path, key=public_key())


def test_hashed_names_are_read_and_a_long_file_takes_no_time(tmp_path: Path) -> None:
    """Through Paramiko 1,200 such lines take 0.3 s, and the time grows with the square."""
    path = tmp_path / "hashed"
    path.write_text("".join(f"host{number} {OTHER}\n" for number in range(5000)) + f"[pve1]:2222 {KEY}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True)
    text = path.read_text()
    assert "pve1" not in text
    began = time.process_time()
    ask(text, tmp_path, port=2222)
    assert time.process_time() - began < 0.5
