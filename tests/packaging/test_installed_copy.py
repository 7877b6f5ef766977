"""What `pip install pctrun` gives, in a folder that is no checkout: sdist, its wheel, a new environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest
from packaging.requirements import Requirement

from controller import release

ROOT = Path(__file__).resolve().parents[2]
SITE = sysconfig.get_paths()["purelib"]

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def built(kind: str, source: Path, into: Path) -> Path:
    """The one file that hatchling makes of the tree in `source`, without an index."""
    line = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    subprocess.run(line, cwd=source, check=True, capture_output=True)
    [made] = into.iterdir()
    return made


def declared() -> set[str]:
    """The distributions that `pip install .[sandbox]` brings, by their names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, found = [*project["dependencies"], *project["optional-dependencies"]["sandbox"]], set[str]()
    while waiting:
        wanted = Requirement(waiting.pop())
        if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and wanted.name not in found:
            found.add(wanted.name)
            waiting += metadata.distribution(wanted.name).requires or []
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of an environment with pctrun from the wheel of the sdist, as pip would make it.

    Its libraries are links to those of the tests, but only to what pyproject.toml declares for `[sandbox]`
    and what that needs: an import that is not declared fails.
    """
    place = tmp_path_factory.mktemp("packaging")
    with tarfile.open(built("sdist", ROOT, place / "sdist")) as archive:
        archive.extractall(place / "tree", filter="data")
    [tree] = (place / "tree").iterdir()
    assert {path.name for path in tree.iterdir()} & {".venv", ".sandbox", ".pctrun", ".git"} == set()
    assert (tree / "tests").is_dir()
    wheel = built("wheel", tree, place / "wheel")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "venv"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    [site] = (place / "venv" / "lib").glob("python*/site-packages")
    for name in sorted(declared()):
        for top in {file.parts[0] for file in metadata.distribution(name).files or ()} - {
            "..",
            "__pycache__",
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(SITE, top))
    return place / "venv" / "bin"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Path:
    """A folder in which `pctrun init` was typed."""
    folder = tmp_path_factory.mktemp("own") / "drafters"
    folder.mkdir()
    done = run(programs, folder, "init")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def box(programs: Path, project: Path) -> Iterator[Path]:
    """The embedded box of that project, with the interpreter of the tests inside; gone afterwards."""
    done = run(programs, project, "sandbox.up", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    yield project
    run(programs, project, "sandbox.down", "--wipe", "--yes")


def run(
    programs: Path, folder: Path, *words: str, program: tuple[str, ...] = ("pctrun",)
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PCTRUN_", "PYTHONPATH"))}
    return subprocess.run(
        [str(programs / program[0]), *program[1:], *words],
        cwd=folder,
        env=kept,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def installed_release(programs: Path) -> str:
    [site] = programs.parent.glob("lib/python*/site-packages")
    return release.scan(site / "remote_payload").id


def test_the_payload_arrives_bit_for_bit(programs: Path) -> None:
    """Recipes, examples, locks and configurations included: the release has the same name."""
    assert installed_release(programs) == release.scan(ROOT / "remote_payload").id


def test_init_writes_a_project_and_says_how_to_go_on(programs: Path, project: Path) -> None:
    names = {path.name for path in project.iterdir()} - {".sandbox", ".pctrun", "__pycache__"}
    assert names == {"inventory.yaml", "tasks.py", ".gitignore"}
    assert (project / "inventory.yaml").read_text() == (ROOT / "inventory.yaml").read_text()
    elsewhere = run(programs, project, "init", "../second")
    made, *steps = elsewhere.stdout.splitlines()
    assert made == f"made inventory.yaml, tasks.py, .gitignore in {project.parent / 'second'}"
    assert [line.split("#")[0].split(None, 0)[0].strip() for line in steps] == [
        f"next     cd {project.parent / 'second'} && pctrun doctor",
        "pctrun deploy",
        "pctrun restart",
    ]


def test_init_overwrites_nothing(programs: Path, project: Path, tmp_path: Path) -> None:
    before = (project / "inventory.yaml").stat().st_mtime_ns
    again = run(programs, project, "init")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.splitlines()[0] == (
        f"error: {project} has inventory.yaml, tasks.py already; nothing was written"
    )
    assert (project / "inventory.yaml").stat().st_mtime_ns == before
    (tmp_path / ".gitignore").write_text(".sandbox/\n")
    (tmp_path / "tasks.py").write_text("mine\n")
    assert run(programs, tmp_path, "init").returncode == 1
    assert not (tmp_path / "inventory.yaml").exists()
    (tmp_path / "tasks.py").unlink()
    kept = run(programs, tmp_path, "init")
    assert kept.stderr == f"{tmp_path}/.gitignore stays as it is; it lacks /.pctrun/, __pycache__/\n"
    assert (tmp_path / ".gitignore").read_text() == ".sandbox/\n"
    assert "nothing was done" in run(programs, tmp_path, "-R", "init", "new").stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [("init", "new"), ("-R", "init"), ("init", "taken")])
def test_init_keeps_its_published_schema(programs: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "tasks.py").touch()
    done = run(programs, tmp_path, *words, "--json")
    schema = json.loads((ROOT / "docs" / "schema" / "init.json").read_text())
    jsonschema.validate(json.loads(done.stdout), schema)


def test_without_a_project_it_says_how_to_make_one(programs: Path, tmp_path: Path) -> None:
    done = run(programs, tmp_path, "status")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1,
        f"error: no inventory.yaml in {tmp_path} or above it",
    )
    assert "pctrun init" in done.stderr


@pytest.mark.parametrize(
    ("words", "mend"),
    [("statsu", "hint: did you mean 'status'? pctrun --list"), ("abort now", "hint: pctrun --help abort")],
)
def test_words_that_are_not_understood_have_a_mend(
    programs: Path, tmp_path: Path, words: str, mend: str
) -> None:
    done = run(programs, tmp_path, *words.split())
    assert (done.returncode, done.stdout, done.stderr.splitlines()[1:]) == (1, "", [mend])


def test_it_works_from_any_folder_below(programs: Path, box: Path) -> None:
    """`pctrun` and `invoke` alike; the box and what was seen of runs lie beside inventory.yaml."""
    below = box / "notes" / "deep"
    below.mkdir(parents=True)
    assert "deploy" in run(programs, below, "--list").stdout
    deployed = json.loads(run(programs, below, "deploy", "--json").stdout)["boxes"][0]
    assert deployed["outcome"] == "deployed", deployed
    assert deployed["release"] == installed_release(programs)
    for program in (("pctrun",), ("python", "-m", "invoke")):
        done = run(programs, below, "status", program=program)
        assert (done.returncode, done.stdout.splitlines()[0]) == (5, "sandbox/200  NOT-RUNNING  no run yet")
    assert (box / ".sandbox").is_dir()
    assert not (below / ".sandbox").exists()


def test_a_copy_of_the_payload_is_what_travels(programs: Path, box: Path) -> None:
    assert run(programs, box, "init", "--payload").returncode == 0
    copy = box / "remote_payload"
    assert release.scan(copy).id == installed_release(programs)
    (copy / "recipes" / "mine.yaml").write_text((copy / "recipes" / "smollm2-135m.yaml").read_text())
    done = run(programs, box, "deploy")
    assert done.returncode == 0, done.stderr
    assert f"payload: the project's copy in {copy}\n" in done.stderr
    assert f"deployed {release.scan(copy).id}" in done.stdout
    (copy / "agent").rename(copy / "agent.old")
    damaged = run(programs, box, "deploy")
    assert (damaged.returncode, damaged.stderr.splitlines()[0]) == (
        1,
        f"error: {copy} is no whole payload: there is no agent/",
    )
    assert run(programs, box, "status").returncode == 5  # the agent of a look is the controller's own
