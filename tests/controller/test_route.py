"""The hops to a host, from inventory.yaml and ssh_config, as OpenSSH would read them."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from controller import route
from controller.endpoint import Endpoint
from controller.errors import PctrunError, Unreachable, Usage
from controller.route import Hop

CONFIG = """
Host pve
  HostName 10.0.0.5
  Port 2222
  User admin
  IdentityFile ~/.ssh/here
  IdentityFile ~/.ssh/gone
  ConnectTimeout 4
Host jumped
  ProxyJump one, ana@two:2200
Host commanded
  ProxyCommand /usr/bin/relay %h %p
Host two
  HostName two.example.org
  User nobody
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(route, "CONFIGS", ("~/.ssh/config",))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "here").touch()
    (tmp_path / ".ssh" / "config").write_text(CONFIG)
    return tmp_path


def hops(host: str, **given: object) -> list[Hop]:
    return route.route(Endpoint(host=host, vmid=200, agent_python="p", python="p", **given))


def test_a_host_of_no_configuration_is_reached_as_root_on_22() -> None:
    assert hops("pve1") == [Hop("pve1", 22, "root", ())]


def test_an_alias_brings_name_port_user_keys_and_patience(home: Path) -> None:
    here = str(home / ".ssh" / "here")
    assert hops("pve") == [Hop("10.0.0.5", 2222, "admin", (here,), timeout_s=4.0)]


def test_the_inventory_wins(home: Path) -> None:
    mine = home / "mine"
    mine.touch()
    [hop] = hops("pve", user="root", port=22, identity_file="~/mine")
    assert (hop.user, hop.port, hop.keys[0]) == ("root", 22, str(mine))


def test_jumps_come_in_their_order_each_with_its_own_configuration() -> None:
    me = getpass.getuser()
    wanted = [("one", 22, me), ("two.example.org", 2200, "ana"), ("jumped", 22, "root")]
    assert [(hop.host, hop.port, hop.user) for hop in hops("jumped")] == wanted
    [first, last] = hops("jumped", proxy_jump="two")
    assert (first.host, first.user, last.host) == ("two.example.org", "nobody", "jumped")
    assert [hop.host for hop in hops("jumped", proxy_jump="none")] == ["jumped"]


def test_a_proxy_command_takes_the_place_of_a_socket_unless_there_is_a_jump() -> None:
    assert hops("commanded")[0].command == "/usr/bin/relay commanded 22"
    assert [hop.command for hop in hops("commanded", proxy_jump="one")] == [None, None]


def test_a_jump_for_every_host_is_none_for_the_jump_host_itself(home: Path) -> None:
    (home / ".ssh" / "config").write_text("Host *\n  ProxyJump bastion\n")
    assert [hop.host for hop in hops("pve1")] == ["bastion", "pve1"]
    assert [hop.host for hop in hops("bastion")] == ["bastion"]


def test_the_embedded_box_is_reached_without_the_persons_configuration() -> None:
    assert hops("pve", embedded=True)[0].host == "pve"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a", ("", "a", None)),
        ("u@a:7", ("u", "a", 7)),
        ("[::1]:7", ("", "::1", 7)),
        ("fe80::1", ("", "fe80::1", None)),
        ("[fe80::1]", ("", "fe80::1", None)),
    ],
)
def test_the_parts_of_a_jump(name: str, wanted: tuple[str, str, int | None]) -> None:
    assert route._parts(name) == wanted


@pytest.mark.parametrize(
    ("config", "given", "kind", "words"),
    [
        (
            "Host pve\n  HostName\n",
            {},
            Unreachable,
            r"~/\.ssh/config cannot be read: Unparsable line HostName",
        ),
        ("", {"proxy_jump": "a:b"}, Usage, "jump host 'a:b': 'b' is no port"),
        ("Host pve\n  Port many\n", {}, Unreachable, "ssh_config names no port for pve: 'many'"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    home: Path, config: str, given: dict[str, str], kind: type[PctrunError], words: str
) -> None:
    (home / ".ssh" / "config").write_text(config)
    with pytest.raises(kind, match=words):
        hops("pve", **given)
