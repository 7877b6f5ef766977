"""A folder of wheels here serves a container without a network: only what it lacks travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controller import release, words
from controller.call import call
from controller.console import Console
from controller.errors import Usage
from controller.inventory import Box

_ENDINGS = (".whl", ".tar.gz", ".zip")


def names(folder: Path) -> list[str]:
    """The distributions in `folder`; raises Usage when there is none."""
    try:
        found = sorted(each.name for each in folder.iterdir() if each.name.endswith(_ENDINGS))
    except OSError as error:
        raise Usage(f"{folder}: {error.strerror}", "--wheelhouse names a folder of wheels") from None
    if not found:
        raise Usage(f"there is no wheel in {folder}", "pip download -d FOLDER …")
    return found


def send(box: Box, folder: Path, chosen: list[str], console: Console) -> int:
    """Bring the chosen files into the container, each from the byte that is there; returns the bytes sent."""
    console.note(f"hashing {words.plural(len(chosen), 'wheel')} of {folder}")
    files = [release.entry(folder / name, folder) for name in chosen]
    manifest = release.manifest_of(files)
    want = call(box, "wheels", {"files": manifest, "stream": False})["want"]
    at = {each["path"]: int(each["from"]) for each in want}
    wanted = [(file, at[file.path]) for file in files if file.path in at]
    if not wanted:
        return 0
    size = sum(file.bytes - start for file, start in wanted)
    args: dict[str, Any] = {"files": manifest, "stream": True}
    stream = console.sent(release.stream(folder, wanted), size)
    call(box, "wheels", args, stream=stream, on_note=console.agent_note)
    return size
