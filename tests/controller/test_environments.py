"""From a lock here to an environment there, through a real sandbox, and what a person reads of it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from agent import lockfile
from controller import (
    env_build,
    env_diff,
    env_list,
    env_prune,
    env_use,
    links,
    records,
    release,
    wheelhouse,
)
from controller.console import Console
from controller.errors import PreflightFailed, Usage
from controller.execution import execute
from controller.inventory import Box, Roots
from tests.agent import tiny_packages as tiny

CONSOLE = Console()
SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schema"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A wheelhouse of this workstation: two versions of one package, and files that nobody wants."""
    for name, data in (tiny.wheel("alpha", "1.0"), tiny.wheel("alpha", "2.0"), tiny.wheel("omega", "1.0")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "notes.txt").write_text("not a wheel\n")
    return tmp_path


def lock(folder: Path, text: str) -> str:
    path = folder / "tiny.txt"
    path.write_text(text)
    return str(path)


def test_a_container_without_a_network_gets_what_it_lacks_and_no_more(box: Box, wheels: Path) -> None:
    """In a place of its own: a release that other tests deployed would have to import there."""
    roots = Roots(**{name: f"/tmp/environments/{name}" for name in records.fields(Roots)})
    box = box.replace(roots=roots)

    def build(text: str) -> env_build.Json:
        path = lock(wheels, text)
        made = env_build.run(box, CONSOLE, lock=path, wheels=str(wheels), base=_base(box))
        return _checked("env.build", box, made.document)

    first = build("alpha==1.0\n")
    size = (wheels / "alpha-1.0-py3-none-any.whl").stat().st_size
    assert (first["outcome"], first["name"], first["sent_bytes"]) == ("built", "tiny", size)
    assert build("alpha==1.0\n")["outcome"] == "unchanged"
    second = build("alpha==2.0\nomega==1.0\n")
    assert second["outcome"] == "built" and second["previous"] == first["id"]
    python = f"{roots.opt}/venv/{second['id']}/bin/python"
    told = execute(box, [python, "-I", "-c", "import alpha; print(alpha.VERSION)"])
    assert told.stdout == b"2.0\n"
    shown = env_list.run(box, CONSOLE)
    users = [row["in_use"] for row in shown.document["environments"]]
    _checked("env.list", box, shown.document)
    assert users == ["the current one", "the previous one"]
    assert shown.text.splitlines()[1].startswith("*  tiny")
    differs = env_diff.run(box, CONSOLE, first="previous", second="current")
    assert [tuple(row.values()) for row in differs.document["differs"]] == [
        ("alpha", "1.0", "2.0"),
        ("omega", None, "1.0"),
    ]
    assert _checked("env.diff", box, differs.document)["same"] == 1  # python
    used = env_use.run(box, CONSOLE, env="previous").document
    assert _checked("env.use", box, used)["outcome"] == "switched"
    pruned = env_prune.run(box, CONSOLE, keep=0, yes=True)
    assert pruned.text.startswith("nothing to remove; kept: ")
    _checked("env.prune", box, pruned.document)


def _checked(task: str, box: Box, document: env_build.Json) -> env_build.Json:
    """`document`, if it is what docs/schema/ promises of it."""
    schema = json.loads((SCHEMAS / f"{task}.json").read_text("utf-8"))
    entry = {"box": box.name, "vmid": box.vmid, "exit_code": 0, **document}
    whole = {"schema": 1, "task": task, "exit_code": 0, "boxes": [entry]}
    jsonschema.validate(json.loads(json.dumps(whole)), schema)
    return document


def _base(box: Box) -> str:
    return links.get(box).endpoint.python


def test_what_a_wheelhouse_lacks_is_named(box: Box, wheels: Path) -> None:
    with pytest.raises(PreflightFailed, match=r"lacks zeta==3\.1, for Python") as refused:
        env_build.run(
            box, CONSOLE, lock=lock(wheels, "alpha==1.0\nzeta==3.1\n"), wheels=str(wheels), base=_base(box)
        )
    assert refused.value.exit_code == 9 and "pip download --no-deps" in refused.value.hint


def test_what_cannot_be_asked_is_said_before_anything_is_sent(tmp_path: Path, box: Box) -> None:
    with pytest.raises(Usage, match="say which environment") as refused:
        env_build.plan(box)
    assert refused.value.hint == "--name with one of cpu, cu130, or --lock FILE"
    with pytest.raises(Usage, match="no lock named 'cu129'"):
        env_build.plan(box, env="cu129")
    with pytest.raises(Usage, match="NAME==VERSION, not 'causal-conv1d'"):
        env_build.plan(box, env="cu130", source=["causal-conv1d"])
    with pytest.raises(Usage, match="cannot be read"):
        env_build.plan(box, lock=str(tmp_path / "none.txt"))
    with pytest.raises(Usage, match="no wheel in"):
        wheelhouse.names(tmp_path)
    with pytest.raises(Usage, match="none: No such file"):
        wheelhouse.names(tmp_path / "none")
    with pytest.raises(Usage, match="compares two"):
        env_diff.plan(box, first="a", second="")


def test_a_stream_that_begins_in_the_middle_is_the_rest_of_the_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    (tmp_path / "a.whl").write_bytes(data)
    file = release.entry(tmp_path / "a.whl", tmp_path)
    for start in (0, 1, 262_144, 300_001, len(data) - 1):
        stream = b"".join(release.stream(tmp_path, [(file, start)]))
        assert stream[512 : 512 + len(data) - start] == data[start:] and len(stream) % 512 == 0


@pytest.mark.parametrize("name", ["cpu", "cu130"])
def test_a_lock_of_ours_is_a_lock(name: str) -> None:
    made = lockfile.parse((release.payload_root() / "locks" / f"{name}.txt").read_text("utf-8"))
    pins = {pin.name: pin.version for pin in made.pins}
    needed = {"torch", "transformers", "safetensors", "numpy", "gguf", "accelerate", "pyyaml", "aiohttp"}
    assert needed <= set(pins) and made.sources == ()
    if name == "cu130":
        measured = ("torch", "2.11.0"), ("triton", "3.6.0"), ("transformers", "5.17.0")
        assert all(pins[package] == version for package, version in measured)
        assert json.dumps(pins).count("nvidia-") > 10
