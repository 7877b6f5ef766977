"""The inventory: each mistake costs one line of text with its place and the nearest valid name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from controller import inventory, records
from controller.errors import InventoryError, Usage

REST = "    vmid: 200\n    recipe: r\n"

GOOD = """
default: lab
boxes:
  lab: {host: pve1, vmid: 200, recipe: r}
  sand: {sandbox: true, vmid: 200, recipe: r}
"""

BROKEN = {
    "unknown-key": "default: lab\nboxes:\n  lab:\n    host: pve1\n    vmdi: 200\n    recipe: r\n",
    "unknown-top-key": "defualt: lab\nboxes:\n  lab: {host: h, vmid: 200, recipe: r}\n",
    "unknown-root": "default: lab\nboxes:\n  lab:\n    host: h\n" + REST + "    roots:\n      optt: /x\n",
    "wrong-types": "default: lab\nboxes:\n  lab:\n    host: h\n    vmid: '200'\n"
    "    port: x\n    recipe: r\n    sudo: yep\n",
    "out-of-range": "default: lab\nboxes:\n  lab: {host: h, vmid: 99, port: 70000, recipe: r, grace_s: -1}\n",
    "duplicate-key": "default: lab\nboxes:\n  lab:\n    host: h\n" + REST + "    host: other\n",
    "duplicate-box": "default: lab\nboxes:\n  lab:\n    host: h\n" + REST + "  lab: {host: h}\n",
    "missing-fields": "default: lab\nboxes:\n  lab:\n    host: h\n",
    "no-host": "default: lab\nboxes:\n  lab:\n    vmid: 200\n    recipe: r\n",
    "sandbox-with-host": "default: s\nboxes:\n  s:\n    sandbox: true\n    host: h\n" + REST,
    "bad-default": "default: lap\nboxes:\n  lab: {host: h, vmid: 200, recipe: r}\n",
    "bad-pin": "default: lab\nboxes:\n  lab: {host: h, vmid: 200, recipe: r, host_key: 'MD5:aa:bb'}\n",
    "relative-root": "default: lab\nboxes:\n  lab: {host: h, vmid: 200, recipe: r, roots: {opt: opt}}\n",
    "no-boxes": "default: lab\nboxes: {}\n",
    "box-is-text": "default: lab\nboxes:\n  lab: pve1\n",
    "name-inside": "default: lab\nboxes:\n  lab:\n    name: x\n    host: h\n    vmid: 200\n    recipe: r\n",
    "not-yaml": "default: lab\nboxes:\n  lab: {host: h\n  x: ]\n",
    "tabs": "default: lab\nboxes:\n\tlab: 1\n",
    "a-date": "default: lab\nboxes:\n  lab:\n    host: h\n" + REST + "    overrides: {name: 2026-01-31}\n",
    "a-number-for-a-name": "default: lab\nboxes:\n  7: {host: h, vmid: 200, recipe: r}\n",
    "without-end": "default: &a [*a]\n",
    "empty": "",
    "a-list": "- a\n- b\n",
}


def load(text: str, folder: Path) -> inventory.Inventory:
    path = folder / "inventory.yaml"
    path.write_text(text)
    return inventory.load(path)


@pytest.mark.parametrize("name", BROKEN)
def test_each_mistake_is_told_with_its_line(
    name: str, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    with pytest.raises(InventoryError) as caught:
        load(BROKEN[name], tmp_path)
    golden(f"inventory/{name}.txt", "\n".join([caught.value.message, *caught.value.evidence]))
    assert caught.value.message.startswith("inventory.yaml:")
    assert caught.value.exit_code == 1


def test_the_shipped_inventory_is_valid_and_the_sandbox_is_its_default() -> None:
    shipped = inventory.load(inventory.PROJECT / "inventory.yaml")
    [box] = shipped.pick([])
    assert (box.name, box.sandbox, box.vmid, box.recipe) == ("sandbox", True, 200, "smollm2-135m")


def test_the_commented_example_is_valid_too(tmp_path: Path) -> None:
    lines = (inventory.PROJECT / "inventory.yaml").read_text().splitlines()
    start = lines.index("  # lab:")
    example = [line.replace("  # ", "  ", 1) for line in lines[start:]]
    text = "\n".join(["default: lab", "boxes:", *example]).replace("SHA256:…", "SHA256:" + "a" * 43)
    [box] = load(text, tmp_path).pick([])
    bare = load("default: lab\nboxes:\n  lab: {host: h, vmid: 200, recipe: r}\n", tmp_path).pick([])[0]
    told = {key for key in records.fields(type(box)) if getattr(box, key) != getattr(bare, key)}
    assert told == {"host", "recipe", "identity_file", "host_key", "proxy_jump", "gpus", "secrets", "notify"}


def test_defaults_and_order(tmp_path: Path) -> None:
    found = load(GOOD, tmp_path)
    assert [box.name for box in found.pick(["sand", "lab", "sand"])] == ["sand", "lab"]
    assert found.pick([])[0].roots.lib == "/var/lib/pctrun"


def test_an_unknown_box_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="no box 'lap' in the inventory; did you mean 'lab'"):
        load(GOOD, tmp_path).pick(["lap"])


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    text = "default: a\nboxes:\n  a: &a {host: h, vmid: 200, recipe: r}\n  b:\n    <<: *a\n    vmid: 201\n"
    assert [box.vmid for box in load(text, tmp_path).pick(["a", "b"])] == [200, 201]
    same = load("default: a\nboxes:\n  a: &a {host: h, vmid: 200, recipe: r}\n  b: *a\n", tmp_path)
    assert [box.name for box in same.pick(["a", "b"])] == ["a", "b"]


def test_it_is_found_upward_or_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inventory.yaml").write_text(GOOD)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.delenv("PCTRUN_INVENTORY", raising=False)
    monkeypatch.chdir(below)
    assert inventory.find() == tmp_path / "inventory.yaml"
    monkeypatch.setenv("PCTRUN_INVENTORY", "/elsewhere.yaml")
    with pytest.raises(InventoryError, match=r"/elsewhere\.yaml cannot be read: No such file") as caught:
        inventory.load()
    assert caught.value.hint == "PCTRUN_INVENTORY names it"
