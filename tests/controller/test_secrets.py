"""References lead to values on this machine, and no complaint about one carries a value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controller import checks_secrets, inventory, secrets
from controller.errors import InventoryError, PreflightFailed
from controller.inventory import Box

VALUE = "planted-51d0"


def a_box(**given: Any) -> Box:
    return Box(name="lab", host="h", vmid=200, recipe="r", **given)


def test_a_variable_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", VALUE)
    path = tmp_path / "token"
    path.write_text(f"{VALUE} of two words\n")
    path.chmod(0o600)
    box = a_box(secrets={"A": "env:HERE", "B": f"file:{path}"})
    assert secrets.environment(box) == {"A": VALUE, "B": f"{VALUE} of two words"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_open_is_refused_with_the_mend(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(VALUE)
    path.chmod(mode)
    with pytest.raises(PreflightFailed, match=rf"others may read .*token \(mode {mode:04o}\)") as caught:
        secrets.read(f"file:{path}")
    assert caught.value.hint == f"chmod 600 {path}"
    assert VALUE not in caught.value.message


@pytest.mark.parametrize(
    "reference,says",
    [
        ("env:NOT_THERE_7", "the environment variable NOT_THERE_7 is not set"),
        ("env:EMPTY_7", "the environment variable EMPTY_7 is empty"),
        ("file:/nowhere/token", "/nowhere/token cannot be read: No such file or directory"),
        ("file:/dev/null", "/dev/null is not a file"),
        ("file:/", "/ is not a file"),
    ],
)
def test_a_reference_that_leads_nowhere(reference: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY_7", "")
    with pytest.raises(PreflightFailed, match=says) as caught:
        secrets.read(reference)
    assert caught.value.exit_code == 9 and caught.value.hint


def test_all_that_are_missing_are_told_at_once() -> None:
    with pytest.raises(
        PreflightFailed, match="secret A of box 'lab': the environment variable NO_A"
    ) as caught:
        secrets.environment(a_box(secrets={"A": "env:NO_A", "B": "env:NO_B"}))
    assert caught.value.evidence == ("secret B of box 'lab': the environment variable NO_B is not set",)


BACKEND = """
import keyring.backend
class Backend(keyring.backend.KeyringBackend):
    priority = 9
    def get_password(self, service, username):
        if service == "locked":
            raise keyring.errors.KeyringLocked("the collection is locked")
        return {("wandb", "pctrun"): "of pctrun", ("wandb", "ana"): "of ana"}.get((service, username))
    def set_password(self, *_): pass
    def delete_password(self, *_): pass
"""
ASK = """
import sys
from controller import secrets
from controller.errors import PreflightFailed
try:
    print(secrets.read(sys.argv[1]))
except PreflightFailed as error:
    print(f"{error.message}|{error.hint}")
"""


@pytest.mark.parametrize(
    "reference,says",
    [
        ("keyring:wandb", "of pctrun"),
        ("keyring:wandb/ana", "of ana"),
        ("keyring:other", "the keyring has nothing for pctrun of other|keyring set other pctrun"),
        ("keyring:locked", "the keyring does not answer: the collection is locked|unlock it"),
    ],
)
def test_the_keyring_is_asked_by_its_own_package(tmp_path: Path, reference: str, says: str) -> None:
    pytest.importorskip("keyring")
    (tmp_path / "our_keyring.py").write_text(BACKEND)
    root = str(inventory.PROJECT)
    place = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}", "PYTHON_KEYRING_BACKEND": "our_keyring.Backend"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, reference], env={**os.environ, **place}, capture_output=True, text=True
    )
    assert done.stdout.startswith(says), (done.stdout, done.stderr)


def test_without_the_package_a_keyring_reference_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(PreflightFailed, match="needs the package keyring") as caught:
        secrets.read("keyring:wandb")
    assert "pip install keyring" in caught.value.hint


def test_doctor_says_whether_they_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks_secrets.here(a_box()) == []
    monkeypatch.setenv("HERE", f"json://{VALUE}")
    box = a_box(secrets={"A": "env:HERE", "B": "env:NO_B"}, notify=inventory.Notify(urls=["env:HERE"]))
    first, second = checks_secrets.here(box)
    assert (first.state, first.mend) == ("failed", "export NO_B=…")
    assert first.says == "secret B of box 'lab': the environment variable NO_B is not set"
    assert second.state == "ok" and second.says.startswith(
        "1 address can be read; the run's own notifier tells of"
    )
    assert VALUE not in first.says + second.says


@pytest.mark.parametrize(
    "entry,says",
    [
        (f"secrets: {{HF_TOKEN: {VALUE}}}", "'secrets.HF_TOKEN' in box 'lab': wants where the value is"),
        ("secrets: {HF_TOKEN: 5113}", "'secrets.HF_TOKEN' in box 'lab' should be a valid string"),
        (f"secrets: {VALUE}", "'secrets' in box 'lab' must be a mapping of keys to values"),
        ("secrets: {A-B: env:X}", "'A-B' cannot be the name of a variable"),
        (f"notify: {{urls: [json://{VALUE}]}}", "'notify.urls.0' in box 'lab': wants where the value is"),
        ("notify: {urls: []}", "'notify.urls' in box 'lab': needs one at least"),
        ("notify: {urls: [env:X], when: [sad]}", "should be 'crashed', 'stalled', 'degraded', 'finished' or"),
        ("notify: {url: [env:X]}", "unknown key 'notify.url' in box 'lab'; did you mean 'urls'?"),
    ],
)
def test_a_value_in_the_inventory_is_refused_and_not_repeated(tmp_path: Path, entry: str, says: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(f"default: lab\nboxes:\n  lab:\n    host: h\n    vmid: 200\n    recipe: r\n    {entry}\n")
    with pytest.raises(InventoryError) as caught:
        inventory.load(path)
    told = json.dumps([caught.value.message, caught.value.hint, caught.value.evidence])
    assert says in told.replace('\\"', '"')
    assert VALUE not in told and "5113" not in told
