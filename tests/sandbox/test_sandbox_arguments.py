"""The argument rules and the table of exit codes of the real `pct`."""

from __future__ import annotations

import pytest


def test_option_of_the_command_before_the_dashes_is_taken_as_pcts_own(box):
    done = box.pct("exec", "200", "bash", "-c", "true")
    assert done.code == 2
    assert "Unknown option: c" in done.err
    assert "400 unable to parse option" in done.err
    assert "pct exec <vmid>" in done.err


def test_command_without_dashes_needs_no_separator(box):
    assert box.pct("exec", "200", "ls", "/usr/bin/env").out == b"/usr/bin/env\n"


def test_only_the_first_separator_is_eaten(box):
    assert box.pct("exec", "200", "--", "printf", "%s,", "--", "-n", "--").out == b"--,-n,--,"


def test_separator_may_stand_before_the_id(box):
    assert box.pct("exec", "--", "200", "printf", "%s,", "-n", "x").out == b"-n,x,"


def test_options_stand_anywhere_before_the_separator(box):
    for words in (
        ["--keep-env", "0", "200"],
        ["200", "--keep-env", "0"],
        ["200", "-keep-env=0"],
        ["--keep=0", "200"],
    ):
        done = box.pct("exec", *words, "--", "sh", "-c", "echo ${HOME-unset}")
        assert done.out == b"unset\n", words


def test_boolean_without_a_value_takes_the_next_word(box):
    done = box.pct("exec", "--keep-env", "200", "--", "true")
    assert done.code == 2
    assert "400" in done.err


@pytest.mark.parametrize("name", ["ex", "exe", "exec"])
def test_subcommands_may_be_abbreviated(box, name):
    assert box.pct(name, "200", "--", "true").code == 0


@pytest.mark.parametrize("name", ["st", "bogus", "", "Exec"])
def test_ambiguous_or_unknown_subcommand_is_255_with_the_usage(box, name):
    done = box.pct(name, "200")
    assert done.code == 255
    assert "unknown command" in done.err
    assert "pct exec <vmid>" in done.err


@pytest.mark.parametrize("vmid", ["99", "abc", "0", "-5x", "2e2", "1000000000", "٢٠٠"])
@pytest.mark.parametrize("command", ["exec", "status", "config", "start", "push"])
def test_bad_id_is_2(box, command, vmid):
    extra = {"exec": ["--", "true"], "push": ["/a", "/b"]}.get(command, [])
    done = box.pct(command, *([vmid, *extra] if not vmid.startswith("-") else ["200", vmid, *extra]))
    assert done.code == 2
    assert "400" in done.err


def test_bad_id_says_which_parameter(box):
    assert "400 Parameter verification failed" in box.pct("status", "99").err
    assert "vmid" in box.pct("status", "99").err


def test_missing_id_is_2(box):
    for command in ("exec", "status", "start", "push"):
        done = box.pct(command)
        assert (done.code, "400 not enough arguments" in done.err) == (2, True)


def test_missing_command_is_255(box):
    for words in (["200", "--"], ["200"]):
        done = box.pct("exec", *words)
        assert (done.code, "missing command" in done.err) == (255, True)


@pytest.mark.parametrize("words", [["exec", "999", "--", "true"], ["status", "999"], ["config", "999"]])
def test_absent_container_is_2(box, words):
    done = box.pct(*words)
    assert done.code == 2
    assert "Configuration file 'nodes/" in done.err
    assert "/lxc/999.conf' does not exist" in done.err


@pytest.mark.parametrize("command", ["start", "stop", "shutdown", "reboot"])
def test_absent_container_is_255_for_what_runs_a_worker(box, command):
    done = box.pct(command, "999")
    assert (done.code, "does not exist" in done.err) == (255, True)


def test_bad_boolean_is_2(box):
    done = box.pct("exec", "--keep-env=maybe", "200", "--", "true")
    assert (done.code, "keep-env" in done.err) == (2, True)


def test_command_that_the_sandbox_lacks_says_so(box):
    done = box.pct("snapshot", "200")
    assert (done.code, "not part of the sandbox" in done.err) == (255, True)
