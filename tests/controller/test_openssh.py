"""The ways in, at a server that nobody here wrote: host keys, key files, agent, jump, a user with sudo."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.house import House, open_house
from tests.faults.openssh import Sshd


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as made:
        yield made


@pytest.fixture(scope="module")
def server(house: House) -> Iterator[Sshd]:
    made = Sshd(house)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def known(house: House, server: Sshd) -> Path:
    """A known_hosts file with the server's key."""
    path = house.base / "known_hosts"
    public = server.public_key.read_text().split()
    path.write_text(f"[127.0.0.1]:{server.port} {public[0]} {public[1]}\n")
    return path


def echo(house: House, server: Sshd, code: int = 0, **changes: Any) -> str:
    """What a command in the container said through that server, or the complaint."""
    house.box("lab", **{"port": server.port, "host_key": server.host_key, **changes})
    said = house.type("exec", "echo through")
    assert said.code == code, said
    return said.out if code == 0 else said.err


def new_key(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def test_a_key_file_and_a_pinned_host_key(house: House, server: Sshd) -> None:
    assert echo(house, server) == "through\n"


def test_a_key_in_known_hosts(house: House, server: Sshd, known: Path) -> None:
    assert echo(house, server, host_key=None, known_hosts=str(known)) == "through\n"


def test_an_unknown_host_key_is_refused_with_the_mend(house: House, server: Sshd, tmp_path: Path) -> None:
    said = echo(house, server, 7, host_key=None, known_hosts=str(tmp_path / "none"))
    assert f"[127.0.0.1]:{server.port} is not known" in said and server.host_key in said
    assert f"ssh-keyscan -p {server.port} 127.0.0.1" in said
    assert not (tmp_path / "none").exists()


def test_a_changed_host_key_is_refused_and_names_both(house: House, server: Sshd, known: Path) -> None:
    server.stop()
    server.start(key="second")
    try:
        said = echo(house, server, 7, host_key=None, known_hosts=str(known))
        assert "has changed" in said and server.host_key in said and "ssh-keygen -R" in said
    finally:
        server.stop()
        server.start()


def test_a_key_that_the_host_does_not_know_is_refused(house: House, server: Sshd) -> None:
    said = echo(house, server, 7, identity_file=str(new_key(house.base, "stranger")))
    assert "refused the login of root" in said


@pytest.fixture
def agent(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ssh-agent with the key that the server lets in, and a home without keys."""
    socket = house.base / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL) as process:
        House.wait_for(socket.exists, "the agent's socket")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        (house.base / "home").mkdir(exist_ok=True)
        monkeypatch.setenv("HOME", str(house.base / "home"))
        yield
        process.terminate()
    socket.unlink(missing_ok=True)


def test_an_agents_key(house: House, server: Sshd, agent: None) -> None:
    assert "there is no key to offer" in echo(house, server, 7, identity_file=None)
    subprocess.run(["ssh-add", "-q", str(house.endpoint.identity_file)], check=True)
    assert echo(house, server, identity_file=None) == "through\n"


def test_through_a_jump_host(house: House, server: Sshd, known: Path) -> None:
    """The server jumps to itself; its key is looked up for both."""
    jump = f"root@127.0.0.1:{server.port}"
    way = {"proxy_jump": jump, "host_key": None}
    assert echo(house, server, **way, known_hosts=str(known)) == "through\n"
    assert "is not known" in echo(house, server, 7, **way, known_hosts=f"{known}.none")


# `nobody` gets a shell and leave to run pct as root, in a mount name space of this server's own.
PRIVATE = """
set -e
mount --make-rprivate /
mount --bind "$0/passwd" /etc/passwd
mount --bind "$0/sudoers" /etc/sudoers
exec "$@"
"""


@pytest.fixture
def with_sudo(house: House) -> Iterator[Sshd]:
    """A server at which `nobody` may log in."""
    if os.geteuid() != 0 or shutil.which("sudo") is None:
        pytest.skip("wants root, to make a user who is not, and sudo: apt-get install sudo")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount name space of our own here")
    folder = Path("/tmp") / house.base.name.replace("pf", "pu")
    folder.mkdir(mode=0o755)
    lines = Path("/etc/passwd").read_text().splitlines()
    others = [line for line in lines if not line.startswith("nobody:")]
    (folder / "passwd").write_text("\n".join([*others, "nobody:*:65534:65534::/nonexistent:/bin/sh", ""]))
    (folder / "keys").write_text(Path(f"{house.endpoint.identity_file}.pub").read_text())
    made = Sshd(house, "for-nobody")
    prefix = ("unshare", "-m", "/bin/sh", "-c", PRIVATE, str(folder))
    try:
        (folder / "sudoers").write_text(sudoers(house, "NOPASSWD: "))
        (folder / "sudoers").chmod(0o440)
        made.start(prefix=prefix, AuthorizedKeysFile=folder / "keys", AllowUsers="nobody")
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


def sudoers(house: House, tag: str) -> str:
    place = house.base / "sandbox" / "bin"
    path = f'Defaults secure_path="{place}:/usr/sbin:/usr/bin:/sbin:/bin"\n'
    return f"{path}Defaults !lecture\nnobody ALL=(root) {tag}{place}/pct\n"


def test_a_user_who_is_not_root_goes_by_sudo(house: House, with_sudo: Sshd) -> None:
    house.base.chmod(0o711)  # as /usr/sbin is: sudo, not the user, reads what is there
    assert echo(house, with_sudo, user="nobody", sudo=True) == "through\n"


def test_sudo_that_wants_a_password_is_told_and_never_waits(house: House, with_sudo: Sshd) -> None:
    file = Path("/tmp") / house.base.name.replace("pf", "pu") / "sudoers"
    file.chmod(0o640)
    with file.open("w") as same:  # the same file: a bind mount shows it and no other
        same.write(sudoers(house, ""))
    file.chmod(0o440)
    said = echo(house, with_sudo, 7, user="nobody", sudo=True)
    assert "password" in said
