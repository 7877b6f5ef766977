"""Only the run's interpreter knows if the payload imports, what a recipe says, what is installed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from typing import Any

from agent.call import Json, Refusal

IMPORT_TIMEOUT_S = 300  # a first import of torch from a cold disk takes minutes at worst
KILLED_S = 5  # one that hangs in a driver does not even hear of SIGKILL
HASH_TIMEOUT_S = 900  # of the training data: a second a GiB, ten from a disk
_DISTRIBUTIONS = (
    "torch",
    "triton",
    "transformers",
    "flash-linear-attention",
    "fla-core",
    "flash-qla",
    "tilelang",
    "causal-conv1d",
)
# torch/version.py alone: importing torch takes seconds, and fails where CUDA's libraries are missing.
_ABOUT = """
import importlib.metadata as metadata, importlib.util, json, os, platform, sys
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
built, spec = {}, importlib.util.find_spec("torch")
try:
    exec(open(os.path.join(os.path.dirname(spec.origin), "version.py")).read(), built)
except Exception:
    built = {}  # no torch, or one that is put together otherwise: a start does not depend on it
print(json.dumps({"versions": versions, "torch": {"cuda": built.get("cuda"), "hip": built.get("hip")}}))
"""
_DOES_NOT_COMPILE = 3
_CHECK = f"""
import compileall, importlib, runpy, sys
module = sys.stdin.readline().strip()
if not module:  # whoever started us is gone
    sys.exit()
importlib.invalidate_caches()  # the release has come since
if not compileall.compile_dir(".", quiet=1):
    sys.exit({_DOES_NOT_COMPILE})
if module == "agent.main":
    importlib.import_module(module)
else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_PACKAGES = """
import importlib.metadata as metadata, json
found = {}
for each in metadata.distributions():
    name = each.metadata["Name"]
    if name:
        found.setdefault(name.lower().replace("_", "-"), each.version)
print(json.dumps(found))
"""


def find_python(given: str | None) -> str:
    """The interpreter's full path, or a `no-python` refusal."""
    path = shutil.which(given or sys.executable)
    if path is None:
        mend = "invoke env.build makes one, or name another: `python` in this box's inventory entry"
        raise Refusal("no-python", f"there is no interpreter {given}", mend)
    return os.path.abspath(path)  # not realpath: a venv's python is a link that must stay one


def run_python(
    python: str, argv: list[str], cwd: str, timeout_s: float, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter on `argv`; refuses when it cannot start or hangs. Imports leave no byte code.

    `more` joins its environment.
    """
    process = _start([python, *argv], cwd, subprocess.DEVNULL, more)
    return _end(process, f"{python} {argv[-1]:.60}", timeout_s)


def _start(
    command: list[str], cwd: str, stdin: int, more: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    fixed = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **fixed, **(more or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise Refusal("no-python", f"{command[0]} cannot run: {error.strerror}") from None


def _end(
    process: subprocess.Popen[str], name: str, timeout_s: float, line: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Send it `line`, wait for its end; refuses, and kills it, when that does not come in time. One that
    hangs in a driver outlives that, and is left."""
    try:
        stdout, stderr = process.communicate(line, timeout_s)
    except subprocess.TimeoutExpired:
        raise Refusal("no-python", f"{name} did not end in {timeout_s:g} s") from None
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


class ImportCheck:
    """Byte-compiles a release and imports it there, in an interpreter that starts before the files are there:
    its own start, 0.1 s, passes while they arrive.

    A context: whoever leaves it without an answer ends the interpreter. `folder` exists already.
    """

    def __init__(self, python: str, folder: str) -> None:
        self._python, self._folder = python, folder
        self._process = _start([python, "-c", _CHECK], folder, subprocess.PIPE)

    def __enter__(self) -> ImportCheck:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def answer(self) -> str:
        """The files are there. The line that `trainer.selfcheck` prints, with versions; refuses what does not
        compile or import."""
        complete = os.path.isfile(os.path.join(self._folder, "trainer", "selfcheck.py"))
        module = "trainer.selfcheck" if complete else "agent.main"
        done = _end(self._process, f"{self._python} {module}", IMPORT_TIMEOUT_S, f"{module}\n")
        if done.returncode == _DOES_NOT_COMPILE:
            said = (done.stdout + done.stderr).strip()
            for number in (errno.ENOSPC, errno.EDQUOT):
                if f"[Errno {number}]" in said:  # no fault of the file's
                    raise OSError(number, os.strerror(number), self._folder)
            raise Refusal("import-check", f"a file does not compile: {_last_line(said)}", _place(said))
        if done.returncode != 0:
            said, place = _last_line(done.stderr), _place(done.stderr)
            missing = "install what is missing into that interpreter"
            if place and said.startswith("ModuleNotFoundError"):
                place = f"{missing}; imported {place}"
            raise Refusal("import-check", f"{self._python} cannot run {module}: {said}", place or missing)
        return _last_line(done.stdout)


def import_check(python: str, folder: str) -> str:
    """ImportCheck of a release that is there already."""
    with ImportCheck(python, folder) as check:
        return check.answer()


def versions(python: str) -> Json:
    """Installed versions of what decides a compile cache, read from metadata: torch is not imported."""
    found: Json = about(python)["versions"]
    return found


def about(python: str) -> Json:
    """`{versions, torch{cuda, hip}}`; `cuda` is what torch was built for, such as "13.0", or null."""
    return ask(python, _ABOUT, *_DISTRIBUTIONS)


def ask(python: str, program: str, *argv: str) -> Json:
    """The JSON object that a short program prints, run apart from whatever lies around."""
    done = run_python(python, ["-I", "-c", program, *argv], "/", 30)
    try:
        found: Json = json.loads(done.stdout)
        return found
    except ValueError:
        raise Refusal("no-python", f"{python} cannot tell its versions: {_last_line(done.stderr)}") from None


def packages(python: str) -> Json:
    """Every installed distribution and its version; empty when the interpreter cannot tell."""
    done = run_python(python, ["-I", "-c", _PACKAGES], "/", 60)
    try:
        found: Json = json.loads(_last_line(done.stdout))
    except ValueError:
        return {}
    return dict(sorted(found.items()))


def describe_recipe(python: str, release_dir: str, recipe: str, overrides: Any) -> Json:
    """What `trainer.describe` says of a recipe: `name config_hash model steps checkpoint_bytes budget
    values`."""
    argv = ["-m", "trainer.describe", recipe, "--overrides", json.dumps(overrides)]
    return _asked(python, release_dir, argv, 60)


def refuse_another_training(
    python: str, release_dir: str, recipe: str, overrides: Any, checkpoint: str
) -> None:
    """Refuses a checkpoint that a run of this recipe cannot go on from, in the trainer's words. A release of
    which that cannot be asked yet passes: its trainer will say so itself."""
    if not os.path.isfile(os.path.join(release_dir, "trainer", "resumable.py")):
        return
    argv = ["-m", "trainer.resumable", recipe, "--overrides", json.dumps(overrides)]
    argv += ["--checkpoint", checkpoint]
    _asked(python, release_dir, argv, HASH_TIMEOUT_S)


def _asked(python: str, release_dir: str, argv: list[str], timeout_s: float) -> Json:
    """The JSON object that a program of the release prints; what it refuses is a `usage` refusal here."""
    done = run_python(python, argv, release_dir, timeout_s)
    try:
        answer = json.loads(_last_line(done.stdout))
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Refusal(
            "import-check", f"{python} cannot read recipes: {_last_line(done.stderr)}", _place(done.stderr)
        )
    if not answer.get("ok"):
        words = str(answer.get("error", "the recipe is not valid"))
        raise Refusal("usage", words, str(answer.get("hint", "")))
    return answer


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _place(text: str) -> str:
    """The innermost `File "…", line N` of a traceback, for the hint."""
    places = [line.strip() for line in text.splitlines() if line.strip().startswith('File "')]
    return f"at {places[-1]}" if places else ""
