"""`current` must be a whole environment at every moment, and a cut must cost no wheel that is here."""

import io
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from agent import lockfile, procs
from agent.call import Refusal
from tests.agent import tiny_packages as tiny
from tests.agent.houses import build, current, says, stocked, venv


@pytest.fixture(scope="module")
def house():
    with stocked() as made:
        yield made


def test_a_lock_becomes_an_environment_once_and_another_stands_beside_it(house):
    first = build(house, "alpha==1.0\n").result
    assert (first["outcome"], first["current"], first["previous"]) == ("built", True, None)
    assert says(house, "current", "import alpha; print(alpha.VERSION)") == "1.0"
    assert first["record"]["packages"] == {"alpha": "1.0"}  # no pip, no setuptools: what the lock says
    assert build(house, "alpha==1.0   # the same\n").result["outcome"] == "unchanged"
    second = build(house, "alpha==2.0\n", name="newer", use=False).result
    assert (second["outcome"], second["current"]) == ("built", False) and current(house) == first["id"]
    assert build(house, "alpha==2.0\n", name="newer").result["outcome"] == "switched"
    assert says(house, "current", "import alpha; print(alpha.VERSION)") == "2.0"
    back = house.call("env-use", env="previous").result
    assert (back["outcome"], back["id"], back["previous"]) == ("switched", first["id"], second["id"])
    listed = house.call("env-list").result
    assert [each["name"] for each in listed["environments"]] == ["newer", "tiny"]
    assert (listed["current"], listed["previous"], listed["building"]) == (first["id"], second["id"], None)
    assert house.call("env-list", only=["nower"]).error["hint"].startswith("there are: newer (")


def test_what_the_base_interpreter_has_is_installed_all_the_same(house, tmp_path):
    """Its pip lies among its packages."""
    base = tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True)
    [packages] = base.glob("lib/python3*/site-packages")
    (packages / "pip").symlink_to(Path(find_spec("pip").origin).parent)
    zipfile.ZipFile(io.BytesIO(tiny.wheel("alpha", "4.0")[1])).extractall(packages)
    args = {"lock": "alpha==4.0\n", "base": str(base / "bin/python"), "offline": True, "use": False}
    assert house.call("env-build", name="full", **args).result["record"]["packages"] == {"alpha": "4.0"}


def test_wheels_that_do_not_agree_never_become_current(house):
    good = build(house, "alpha==1.0\n").result["id"]
    before = house.call("env-list").result
    refused = build(house, "alpha==2.0\nneedy==1.0\n").error
    assert refused["kind"] == "environment" and refused["log"] == ["needy 1.0 wants alpha>=9, which is 2.0"]
    after = house.call("env-list").result
    assert current(house) == good
    for what in ("environments", "half_built"):
        assert len(after[what]) == len(before[what])


def test_an_environment_that_the_release_cannot_use_is_kept_but_not_used(house):
    before = build(house, "alpha==1.0\n").result["id"]
    files = house.payload(
        **{"trainer/describe.py": None, "trainer/selfcheck.py": "import alpha\nprint('fine')\n"}
    )
    assert house.deploy(files, python="env:current").result["versions"] == "fine"
    refused = build(house, "omega==1.0\n", name="bare").error
    assert refused["kind"] == "import-check" and "No module named 'alpha'" in refused["message"]
    assert "invoke env.use bare" in refused["hint"] and current(house) == before
    assert house.call("env-list", only=["bare"]).result["environments"][0]["packages"] == {"omega": "1.0"}
    assert house.call("env-use", env="bare").error["kind"] == "import-check"
    shutil.rmtree(house.roots["opt"] + "/releases")  # for the tests that follow


def test_what_the_wheelhouse_lacks_is_said_before_anything_is_made(house):
    before = house.call("env-list").result["half_built"]
    refused = build(house, "alpha==1.0\nzeta==3.1\neta==0.2\n--no-binary eta\n").error
    assert "lacks zeta==3.1, eta==0.2 (its source), for Python" in refused["message"]
    assert house.call("env-list").result["half_built"] == before
    offered = ["alpha-2.0-py3-none-any.whl", "alpha-1.0-cp27-cp27m-linux_x86_64.whl", "junk.txt"]
    offered += ["zeta-3.1-py3-none-any.whl", "eta-0.2.tar.gz", "eta-0.2-py3-none-any.whl"]
    looked = build(house, "alpha==1.0\nzeta==3.1\neta==0.2\n--no-binary eta\n", offered=offered).result
    assert (looked["outcome"], looked["send"]) == ("missing", ["eta-0.2.tar.gz", "zeta-3.1-py3-none-any.whl"])


@pytest.mark.parametrize(
    ("pin", "more", "message", "mend"),
    [
        ("omega==9.0+cpu", {}, "no package index here has omega==9.0+cpu", "its maker's own index"),
        (
            "torch==2.1.0+here",
            {},
            "no package index here has torch==2.1.0+here",
            "lies on PyTorch's own index",
        ),
        (
            "omega==9.0",
            {},
            "no package index here has omega==9.0",
            "name one that has it in a copy of the lock",
        ),
        (
            "omega==9.0+cpu",
            {"PIP_CONSTRAINT": "omega<9.5"},
            "no package index here has omega==9.0+cpu, or the constraint omega<9.5 forbids it",
            "constraints come from PIP_CONSTRAINT or pip.conf",
        ),
        (
            "omega==9.0",
            {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1"},
            "no package index that can be reached has omega==9.0",
            "send the wheels: --wheelhouse FOLDER",
        ),
    ],
)
def test_a_package_that_pip_does_not_find_is_one_line_with_the_mend(
    house, tmp_path, pin, more, message, mend
):
    """Whatever pip's own headline is; with a constraint it is that of a conflict."""
    empty = tmp_path / "simple"
    empty.mkdir()
    around = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": empty.as_uri(),
        **more,
    }  # none of the machine's
    if "PIP_CONSTRAINT" in more:
        (tmp_path / "constraints.txt").write_text(more["PIP_CONSTRAINT"])
        around["PIP_CONSTRAINT"] = str(tmp_path / "constraints.txt")
    house.environment |= around
    try:
        asked = house.call("env-build", name="none", lock=f"alpha==1.0\n{pin}\n", base=house.python).error
    finally:
        for name in around:
            del house.environment[name]
    assert (asked["kind"], asked["message"]) == ("environment", f"installing 2 packages failed: {message}")
    assert mend in asked["hint"] and "log" not in asked


# -- cuts ----------------------------------------------------------------------------------------------------


def test_wheels_go_on_at_the_byte_where_the_stream_was_cut(box):
    name, data = tiny.wheel("alpha", "1.0", {"alpha.py": f"DATA = {'x' * 3_000_000!r}\n"})
    manifest = box.manifest_of({name: data})
    stream = box.tar_of({name: data})
    cut = box.call("wheels", files=manifest, stream=True, stream_bytes=stream[:2_500_000]).error
    assert cut["kind"] == "verify" and "goes on where this ended" in cut["hint"]
    [want] = box.call("wheels", files=manifest).result["want"]
    assert 1_000_000 < want["from"] < 2_500_000
    rest = box.tar_of({name: data[want["from"] :]})
    kept = box.call("wheels", files=manifest, stream=True, stream_bytes=rest).result
    assert kept == {"files": 1, "bytes": len(data) - want["from"]}
    assert (Path(box.roots["lib"]) / "wheelhouse" / name).read_bytes() == data
    assert box.call("wheels", files=manifest).result["want"] == []


def test_a_damaged_or_foreign_file_is_never_kept(box):
    name, data = tiny.wheel("alpha", "1.0")
    manifest = box.manifest_of({name: data})
    bad = box.tar_of({name: data[:-1] + b"?"})
    assert (
        "arrived damaged"
        in box.call("wheels", files=manifest, stream=True, stream_bytes=bad).error["message"]
    )
    other = box.tar_of({"beta-1.0-py3-none-any.whl": b"x"})
    assert (
        "not wanted" in box.call("wheels", files=manifest, stream=True, stream_bytes=other).error["message"]
    )
    assert box.call("wheels", files=box.manifest_of({"../x.whl": b""})).error["kind"] == "usage"
    assert box.call("wheels", files=box.manifest_of({"notes.txt": b""})).error["kind"] == "usage"
    assert box.call("wheels", files=manifest).result["want"] == [{"path": name, "from": 0}]


# -- runs ----------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_environment_and_prune_never_takes_one_in_use(house):
    assert house.deploy().result["outcome"] == "deployed"
    envs = [build(house, "alpha==1.0\n").result["id"]]
    started = house.call("start", recipe="tiny", overrides={"behave": "train"}, python="env:current").result
    record = house.file(started["run"], "run.json")
    assert record["python"] == str(venv(house, envs[0]) / "bin/python")
    assert house.file(started["run"], "provenance.json")["env"] == {"id": envs[0], "name": "tiny"}
    locks = ("alpha==2.0\n", "omega==1.0\n", "alpha==3.0\n")
    envs += [build(house, each).result["id"] for each in locks]
    spare = build(house, "alpha==4.0\n", use=False).result["id"]
    with subprocess.Popen(
        [venv(house, envs[1]) / "bin/python", "-c", "input()"], stdin=subprocess.PIPE
    ) as other:
        house.wait_for(lambda: b"venv" in procs.read_proc(other.pid, "cmdline"), "it runs")
        looked = house.call("env-prune").result
        other.communicate(b"\n")
    kept = looked["kept"]
    assert kept[envs[0]] == f"{started['run']} is alive" and kept[envs[1]] == f"process {other.pid} uses it"
    assert (kept[envs[2]], kept[envs[3]]) == ("the previous one", "the current one")
    doomed = [each["id"] for each in looked["doomed"]]
    assert spare in doomed and not set(envs) & set(doomed) and looked["freed_bytes"] > 0
    refused = house.call("env-prune", envs=[envs[0]]).error
    assert refused["kind"] == "usage" and "is alive" in refused["message"]
    assert house.call("env-prune", keep=100).result["doomed"] == []
    assert house.call("env-prune", envs=[*doomed, envs[1]]).result["removed"] == [*doomed, envs[1]]
    assert not venv(house, envs[1]).exists() and venv(house, envs[0]).exists()
    house.call("stop")
    house.call("pin", run=started["run"])
    assert house.call("env-prune").result["kept"][envs[0]] == f"{started['run']} is pinned"
    house.call("pin", run=started["run"], off=True)
    assert [each["id"] for each in house.call("env-prune").result["doomed"]] == [envs[0]]


def test_an_interpreter_made_by_hand_is_left_alone(box):
    by_hand = venv(box, "current")
    (by_hand / "bin").mkdir(parents=True)
    (by_hand / "bin" / "python").symlink_to(sys.executable)
    refused = build(box, "alpha==1.0\n").error
    assert refused["kind"] == "environment" and "made by hand" in refused["message"]
    assert f"mv {by_hand} {by_hand}-by-hand" in refused["hint"]
    seen = box.call("doctor", python="env:current", prove=False).result["python"]
    assert seen["path"] == str(by_hand / "bin/python") and seen["error"] is None


def test_an_environment_that_is_not_there_is_said(ready):
    answer = ready.call("start", recipe="tiny", overrides={}, python="env:cu130")
    assert answer.error["kind"] == "no-python" and "venv/cu130/bin/python" in answer.error["message"]
    assert "invoke env.build" in answer.error["hint"]


# -- locks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch>=2.10\n", "line 1 of the lock does not pin one version: torch>=2.10"),
        ("\n\ntorch\n", "line 3 of the lock does not pin"),
        ("torch==2.*\n", "does not pin"),
        ("a==1\nA==2\n", "line 2 of the lock pins a a second time"),
        ("torch @ file:///x.whl\n", "does not pin"),
        ("a==1\n--trusted-host x\n", "line 2 of the lock has an option that is not taken"),
        ("a==1\n--no-binary :all:\n", "an option that is not taken"),
        ("a==1\n--no-binary b\n", "builds b from source, but pins no version of it"),
        ("a==1\n--index-url https://me:secret@host/simple\n", "holds the login of an index"),
        ("# nothing\n", "pins nothing"),
    ],
)
def test_a_lock_that_does_not_pin_is_refused_with_its_line(text, words):
    with pytest.raises(Refusal) as refused:
        lockfile.parse(text)
    assert words in refused.value.message
    assert "secret" not in refused.value.message + refused.value.hint


def test_a_lock_is_what_pip_tools_write():
    text = (
        "# python: 3.12\n--extra-index-url https://a.org/whl\nTorch==2.13.0+cpu ; os_name == 'posix' \\\n"
        "    --hash=sha256:aa \\\n    --hash=sha256:bb\nflash_linear.attention[cuda]==0.6.0  # via us\n"
    )
    lock = lockfile.parse(text)
    assert [(pin.name, pin.version) for pin in lock.pins] == [
        ("torch", "2.13.0+cpu"),
        ("flash-linear-attention", "0.6.0"),
    ]
    assert lock.pins[0].line.endswith("--hash=sha256:aa --hash=sha256:bb") and lock.python == "3.12"
    assert lock.options == ("--extra-index-url", "https://a.org/whl")
    turned = lockfile.parse("\n".join(reversed([pin.line for pin in lock.pins])))
    facts = {"python": "3.12", "machine": "x86_64", "arch": None}
    assert lock.identity(facts) == turned.identity(facts) != lock.identity({**facts, "arch": "9.0"})


def test_a_lock_for_another_python_is_refused(house):
    refused = build(house, "# python: 3.4\nalpha==1.0\n").error
    assert refused["kind"] == "environment" and "is for Python 3.4" in refused["message"]
    assert "--base /usr/bin/python3.4" in refused["hint"]
