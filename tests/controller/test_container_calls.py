"""Calls through a real SSH server, a real `pct` and a real container: what arrives, and what refusals say."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import abort, attach, deploy, embedded, links, release, restart, sandbox, status, stopping
from controller.call import call
from controller.console import Console
from controller.endpoint import resolve
from controller.errors import AgentFailed, NotRunning, PctRefused, PreflightFailed, Unreachable, Usage
from controller.execution import ExecResult, execute
from controller.inventory import Box
from controller.transport import Link
from controller.verdict import Verdict


@pytest.fixture(scope="module")
def embedded_box(embedded: sandbox.Endpoint) -> Iterator[tuple[Box, sandbox.Endpoint]]:
    """One connection for the whole module: a property test takes no fixture anew for each example."""
    box = Box(name="property", sandbox=True, vmid=embedded.vmid, recipe="r")
    yield box, embedded
    links.drop(box)


@settings(max_examples=8, deadline=None)
@given(st.binary(max_size=300_000))
def test_any_stdin_arrives_unchanged(embedded_box: tuple[Box, sandbox.Endpoint], data: bytes) -> None:
    assert execute(embedded_box[0], ["cat"], stdin=data) == ExecResult(0, None, data, b"")


def test_without_stdin_a_command_reads_nothing(box: Box) -> None:
    assert execute(box, ["cat"]) == ExecResult(0, None)


def test_outputs_stay_apart_and_the_code_comes_back(box: Box) -> None:
    result = execute(box, ["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert result == ExecResult(7, None, b"out\n", b"err\n")


def test_a_signal_is_named(box: Box) -> None:
    assert execute(box, ["sh", "-c", "kill -9 $$"]) == ExecResult(137, "SIGKILL")


def test_a_command_sees_a_clean_environment(box: Box) -> None:
    seen = execute(box, ["env"]).stdout.decode()
    assert "LANG=C.UTF-8" in seen
    assert "SSH_" not in seen


def test_a_missing_command_is_a_refusal(box: Box) -> None:
    with pytest.raises(Usage, match="command not found: no-such-command"):
        execute(box, ["no-such-command"])


def test_a_command_over_its_time_is_ended(box: Box) -> None:
    began = time.monotonic()
    with pytest.raises(Usage, match="did not end in"):
        execute(box, ["sleep", "60"], timeout_s=0.5)
    assert time.monotonic() - began < 50


def test_each_call_is_one_pct_exec(box: Box, embedded: sandbox.Endpoint) -> None:
    before = links.round_trips(box)
    for _ in range(3):
        execute(box, ["true"])
    assert links.round_trips(box) - before == 3


def test_an_error_of_the_agent_keeps_its_kind_and_its_mend(box: Box) -> None:
    with pytest.raises(NotRunning) as caught:
        call(box, "read", {"run": "r-9999", "lines": 1})
    assert caught.value.exit_code == 5
    with pytest.raises(Usage, match="no verb"):
        call(box, "no-such-verb", {})


def test_a_start_without_a_release_is_a_failed_preflight(real_box: Callable[..., Box]) -> None:
    bare = real_box(roots={f: f"/tmp/bare/{f}" for f in ("opt", "lib", "cache", "run")})
    with pytest.raises(PreflightFailed) as caught:
        restart.run(bare, Console())
    assert (caught.value.kind, caught.value.exit_code) == ("no-release", 9)


def test_roots_of_the_inventory_are_used(real_box: Callable[..., Box]) -> None:
    other = real_box(roots={f: f"/tmp/other/{f}" for f in ("opt", "lib", "cache", "run")})
    outcome = status.run(other, Console())
    assert outcome.document["snapshot"]["release"]["current"] is None
    assert outcome.exit_code == 5


@pytest.fixture
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the payload that the test may change."""
    copy = tmp_path / "remote_payload"
    shutil.copytree(release.payload_root(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(release, "payload_root", lambda: copy)
    return copy


def test_a_deploy_is_one_round_trip_changed_or_not(box: Box, payload: Path) -> None:
    first = deploy.run(box, Console())
    assert first.document["outcome"] == "deployed"
    assert first.document["round_trips"] == 1
    second = deploy.run(box, Console())
    assert second.document["outcome"] == "unchanged"
    assert second.document["round_trips"] == 1
    assert second.text.startswith(f"unchanged {first.document['release']} (1 round trip, ")


def test_a_changed_file_is_all_that_travels(box: Box, payload: Path) -> None:
    deploy.run(box, Console())
    (payload / "recipes" / "one-more.yaml").write_text("a: 1\n")
    changed = deploy.run(box, Console()).document
    assert changed["round_trips"] == 1
    assert changed["sent_bytes"] == 2048  # one header, one block, the end
    where = f"{box.roots.opt}/current/recipes/one-more.yaml"
    assert execute(box, ["cat", where]).stdout == b"a: 1\n"


def test_a_payload_that_does_not_compile_changes_nothing(box: Box, payload: Path) -> None:
    good = deploy.run(box, Console()).document["release"]
    (payload / "trainer" / "config.py").write_text("def broken(:\n")
    with pytest.raises(PreflightFailed) as caught:
        deploy.run(box, Console())
    assert (caught.value.kind, caught.value.exit_code) == ("import-check", 9)
    assert status.run(box, Console()).document["snapshot"]["release"]["current"] == good


def test_stopping_what_does_not_run_succeeds(box: Box) -> None:
    outcome = abort.run(box, Console())
    assert outcome.exit_code == 0
    assert outcome.text.startswith("nothing to stop")


def test_a_named_run_that_is_over_says_nothing_of_others() -> None:
    result = {"outcome": "nothing-to-stop", "run": "r-0001"}
    assert stopping.text(result) == "nothing to stop: r-0001 is not running"


def test_another_vmid_is_not_here(real_box: Callable[..., Box]) -> None:
    with pytest.raises(PctRefused, match="container 999 does not exist on"):
        execute(real_box(vmid=999), ["true"])


def test_a_container_without_that_python_says_so(real_box: Callable[..., Box]) -> None:
    with pytest.raises(PreflightFailed, match="has no /nowhere/python3 that runs") as caught:
        execute(real_box(agent_python="/nowhere/python3"), ["true"])
    assert caught.value.kind == "no-python"


def test_a_python_that_is_none_is_the_agents_failure(real_box: Callable[..., Box]) -> None:
    with pytest.raises(AgentFailed, match="ended with status 0 and no answer"):
        execute(real_box(agent_python="/bin/true"), ["true"])


def test_a_container_that_is_off_is_not_running_and_not_unreachable(
    real_box: Callable[..., Box], embedded: sandbox.Endpoint
) -> None:
    off = real_box()
    host = Link(resolve(off))

    def pct(action: str) -> int | None:
        return host.run(
            f"pct {action} {embedded.vmid}", on_stdout=lambda data: None, on_stderr=lambda data: None
        )

    assert pct("stop") == 0
    try:
        outcome = status.run(off, Console())
        assert (outcome.word, outcome.exit_code) == ("not-running", 5)
        assert "pct start" in outcome.text
    finally:
        assert pct("start") == 0
        host.close()


def test_a_sandbox_that_was_taken_down_stays_down_until_it_is_wanted(box: Box) -> None:
    assert status.run(box, Console()).word == "not-running"
    embedded.down()
    links.drop(box)
    try:
        outcome = status.run(box, Console())
        assert (outcome.word, outcome.exit_code) == ("unreachable", 7)
        with pytest.raises(Unreachable, match="taken down by hand"):
            execute(box, ["true"])
        assert not sandbox.status().server_alive
    finally:
        embedded.up(revive=True)
    assert execute(box, ["true"]).code == 0


def test_the_connection_is_made_anew_after_a_cut(box: Box) -> None:
    link = links.get(box)
    assert sandbox.cut_connections()
    deadline = time.monotonic() + 60
    while link.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not link.alive
    assert execute(box, ["echo", "again"]).stdout == b"again\n"
    assert links.get(box) is not link


def test_the_attach_line_is_for_openssh_as_it_stands(box: Box) -> None:
    outcome = attach.run(box, Console(), run_id="r-0001", only_print=True)
    argv = outcome.document["argv"]
    assert argv[:2] == ["ssh", "-t"]
    assert argv[-1].startswith("pct exec 200 -- env TMUX_TMPDIR=/run/pctrun/tmux TERM=")
    assert argv[-1].endswith("tmux -L pctrun attach -t r-0001")
    known = next(word.partition("=")[2] for word in argv if word.startswith("UserKnownHostsFile="))
    assert known[0] == known[-1] == '"'  # or a space in the path would make two files of it
    assert "ssh-ed25519" in Path(known.strip('"')).read_text()


def test_attach_to_what_cannot_be_looked_at_is_unreachable_and_not_a_wrong_option(
    real_box: Callable[..., Box],
) -> None:
    with pytest.raises(Unreachable, match="cannot look for the run"):
        attach.run(real_box(port=1), Console(), only_print=True)


def test_the_sandbox_has_one_container(box: Box) -> None:
    other = box.replace(name="other", vmid=201)
    with pytest.raises(Usage, match="the sandbox has container 200, not 201"):
        execute(other, ["true"])


def test_attach_without_a_session_says_what_there_is(box: Box) -> None:
    with pytest.raises(NotRunning, match="no tmux session to attach to"):
        attach.run(box, Console(), only_print=True)


def test_attach_to_a_tmux_that_does_not_answer_says_so(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"run": {"id": "r-0001", "tmux": None}}
    monkeypatch.setattr(status, "look", lambda box, **_: (Verdict("healthy", ""), seen))
    with pytest.raises(NotRunning, match="tmux in the container does not answer"):
        attach.run(box, Console(), only_print=True)


def test_the_package_offers_execute_by_itself(box: Box) -> None:
    import controller

    assert controller.execute(box, ["echo", "hi"]).stdout == b"hi\n"
    assert sorted(controller.__all__) == ["ExecResult", "execute"]
    with pytest.raises(AttributeError):
        _ = controller.nothing_of_the_kind


@pytest.mark.parametrize("way", ["embedded", "real"])
def test_neither_look_nor_start_starts_a_container_that_was_stopped(
    way: str, box: Box, real_box: Callable[..., Box]
) -> None:
    chosen = box if way == "embedded" else real_box()
    mend = "invoke sandbox.up" if way == "embedded" else f"on 127.0.0.1: pct start {box.vmid}"
    pct = sandbox.sandbox_dir() / "bin" / "pct"
    subprocess.run([pct, "stop", str(box.vmid)], check=True)
    try:
        verdict, snapshot = status.look(chosen)
        assert (verdict.word, snapshot, verdict.mend) == ("not-running", None, mend)
        with pytest.raises(NotRunning, match="is not running") as caught:
            restart.run(chosen, Console())
        assert (caught.value.hint, caught.value.exit_code) == (mend, 5)
        assert not sandbox.status().container_running
    finally:
        embedded.up(revive=True, start_stopped=True)
    assert status.look(chosen)[1] is not None
