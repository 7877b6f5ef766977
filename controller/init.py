"""An own project in any folder: an installed copy has no checkout around it to keep boxes in."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from controller import project, release
from controller.console import Console
from controller.errors import PctrunError, Usage
from controller.outcome import Outcome

_TASKS = '''"""Where `invoke` looks for tasks; they are those of pctrun."""

from controller.tasks import namespace as namespace
'''
_IGNORED = ("/.pctrun/", "/.sandbox/", "__pycache__/")
_NEXT = (
    ("pctrun doctor", "all that a run needs (your box: inventory.yaml)"),
    ("pctrun deploy", "the payload into the container"),
    ("pctrun restart", "a run; is it fine: pctrun status"),
)


def run(console: Console, folder: Path, *, payload: bool) -> Outcome:
    """Make a project in `folder`; with `payload` a copy of it to edit, too, also in a project that is there.

    Nothing is overwritten: raises Usage when inventory.yaml, tasks.py or the copy is there already. A
    .gitignore that is there stays, and a note says which lines it lacks.
    """
    folder = folder.expanduser().resolve()
    files = _files(folder, payload)
    taken = [path.name for path in files if path.exists()]
    if taken:
        hint = "pctrun init --payload adds a copy of the payload" if project.FILE_NAME in taken else ""
        raise Usage(f"{folder} has {', '.join(taken)} already; nothing was written", hint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            if text is None:
                _copy_payload(path)
            else:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
        made = [path.name for path in files] + _ignore(console, folder / ".gitignore")
    except OSError as error:
        raise PctrunError(f"{error.filename or folder}: {error.strerror}") from None
    enter = "" if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    steps = [f"{enter if number == 0 else ''}{command}" for number, (command, _) in enumerate(_NEXT)]
    document = {"folder": str(folder), "made": made, "next": steps}
    width = max(map(len, steps))
    lines = [f"made {', '.join(made)} in {folder}"]
    for step, (_, why) in zip(steps, _NEXT, strict=True):
        lines.append(f"  {'next' if len(lines) == 1 else '':<9}{step:<{width}}   # {why}")
    return Outcome(document, "\n".join(lines))


def _files(folder: Path, payload: bool) -> dict[Path, str | None]:
    """What is to be made, with its text; None for the payload's folder."""
    copy: dict[Path, str | None] = {folder / release.PAYLOAD: None} if payload else {}
    if payload and (folder / project.FILE_NAME).is_file():
        return copy
    return {folder / project.FILE_NAME: _inventory(), folder / "tasks.py": _TASKS, **copy}


def _inventory() -> str:
    """The checkout's inventory.yaml with every key; the wheel holds the same text."""
    if project.is_checkout():
        return (project.PROJECT / project.FILE_NAME).read_text("utf-8")
    return Path(__file__).with_name("inventory_sample.yaml").read_text("utf-8")


def _copy_payload(place: Path) -> None:
    """Exactly what would travel; the folder appears when it is whole."""
    draft = place.with_name(f".{place.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    for entry in release.scan(release.own_payload()).entries:
        target = draft / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(release.own_payload() / entry.path, target)
        target.chmod(entry.mode)
    draft.rename(place)


def _ignore(console: Console, path: Path) -> list[str]:
    """Make .gitignore, or say what the one that is there lacks; the names of what was made."""
    if not path.exists():
        path.write_text("".join(f"{line}\n" for line in _IGNORED), "utf-8")
        return [path.name]
    there = path.read_text("utf-8", errors="replace").split()
    lacking = [line for line in _IGNORED if line.strip("/") not in {each.strip("/") for each in there}]
    if lacking:
        console.note(f"{path} stays as it is; it lacks {', '.join(lacking)}")
    return []
