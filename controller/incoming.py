"""Files from a container lie aside until the last byte is proven: a folder appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from controller import words
from controller.errors import PctrunError, ProtocolError, Usage
from controller.inventory import Box

Json = dict[str, Any]

LABEL = "pctrun.json"  # beside the files: where they came from
_BAR = 24  # characters
_PIECE = 1024 * 1024


class Damaged(PctrunError):
    """A file that arrived is not the one that was sent."""

    kind = "verify"


class Incoming:
    """The files of one folder on their way into `out`: `final` once they are whole, `.NAME.part` until then.

    `received` counts the bytes that travelled. Use: `have` into the request, `announced` and `take` as they
    come, `settle` with the result, `close` in any case. With `unseen` git does not show what lies in `out`.
    """

    def __init__(self, out: Path, box: Box, progress: Callable[[str], None], *, unseen: bool = False) -> None:
        self.out, self.box, self._progress, self._unseen = out, box, progress, unseen
        self.final = self.partial = out
        self.received = 0
        self._began = time.monotonic()
        self._files: list[Json] = []  # as announced; a file is complete when `at` is its size
        self._current = 0
        self._handle: IO[bytes] | None = None

    def have(self) -> dict[str, Json]:
        """By source: the files that lie here of it, whole or in part, as the agent described them."""
        found: dict[str, Json] = {}
        for label in (*self.out.glob(f"*/{LABEL}"), *self.out.glob(f".*.part/{LABEL}")):
            told = _read(label)
            if told.get("box") != self.box.name or not isinstance(told.get("source"), str):
                continue
            files: Json = {}
            for file in told.get("files") or []:
                path = label.parent / _plain(str(file.get("path")))
                got = path.stat().st_size if path.is_file() else 0
                files[str(file.get("path"))] = {**file, "got": got}
            found[told["source"]] = files  # a part, which comes last, counts more than what is in place
        return found

    def announced(self, part: Json) -> None:
        """The agent's list: refuses what cannot be placed, makes room, keeps what is here already."""
        name = _plain(str(part["source"]).replace("/checkpoints/", "-").replace("/", "-"))
        self.final, self.partial = self.out / name, self.out / f".{name}.part"
        self._files = [
            {**file, "path": _plain(str(file["path"])), "at": file["from"]} for file in part["files"]
        ]
        self._current = 0
        missing = sum(file["bytes"] - file["at"] for file in self._files)
        if self.final.exists():
            told = _read(self.final / LABEL)
            if told.get("source") != part["source"] or told.get("box") != self.box.name or missing:
                raise self._in_the_way()
            return
        self.partial.mkdir(parents=True, exist_ok=True)
        if self._unseen and not (self.out / ".gitignore").exists():
            (self.out / ".gitignore").write_text("*\n", "ascii")
        free = shutil.disk_usage(self.partial).free
        if free < missing:
            raise PctrunError(
                f"{self.out} has {words.size(free)} free, {words.size(missing)} are to come",
                "name a folder on another disk with --out",
                kind="disk",
            )
        where = {"box": self.box.name, "vmid": self.box.vmid, "host": self.box.host}
        facts = {key: part[key] for key in ("run", "source", "step", "tau", "files")}
        _write(self.partial / LABEL, {"schema": 1, **where, **facts})
        for file in self._files:
            path = self.partial / file["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as handle:
                handle.truncate(file["at"])

    def take(self, data: bytes) -> None:
        """The next bytes of the stream: each file's rest, one after the other."""
        view = memoryview(data)
        while view:
            file = self._unfinished()
            if self._handle is None:
                self._handle = (self.partial / file["path"]).open("ab", buffering=0)
            piece = view[: file["bytes"] - file["at"]]
            self._write(piece)
            file["at"] += len(piece)
            self.received += len(piece)
            view = view[len(piece) :]
            if file["at"] == file["bytes"]:
                self.close()
        self._progress(self._bar())

    def _write(self, piece: memoryview) -> None:
        assert self._handle is not None
        try:
            while piece:
                piece = piece[self._handle.write(piece) :]
        except OSError as error:
            mend = "make room: what has arrived stays, and the same command goes on from there"
            raise PctrunError(f"{self.partial}: {error.strerror}", mend, kind="disk") from None

    def settle(self, result: Json) -> None:
        """Verify every file by its hash, then move the folder into place.

        Raises Damaged and drops the file; what was in place already is never touched.
        """
        self.close()
        folder = self.final if self.final.exists() else self.partial
        for file in result["files"]:
            path = folder / _plain(str(file["path"]))
            self._progress(f"verifying {file['path']}")
            if not path.is_file() or _sha256(path) != file["sha256"]:
                if folder is self.final:
                    raise self._in_the_way()
                path.unlink(missing_ok=True)
                raise Damaged(f"{path} is not the file that {self.box.name} has", "fetch it again")
        if folder is self.final:
            return
        known = {"schema": 1, "box": self.box.name, "vmid": self.box.vmid, "host": self.box.host}
        facts = {key: result[key] for key in ("run", "source", "step", "tau", "made_by", "files")}
        _write(self.partial / LABEL, {**known, **facts, "fetched_at": time.time()})
        self.partial.rename(self.final)

    def close(self) -> None:
        """End the file in progress; what it has stays."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.flush()
            os.fsync(handle.fileno())
            handle.close()

    def _in_the_way(self) -> Usage:
        return Usage(
            f"{self.final} is here already and is not what {self.box.name} has now",
            "move it away, or name another folder with --out",
        )

    def _unfinished(self) -> Json:
        while self._current < len(self._files):
            file = self._files[self._current]
            if file["at"] < file["bytes"]:
                return file
            self._current += 1
        raise ProtocolError("the agent sent more bytes than it had announced")

    def _bar(self) -> str:
        whole = sum(file["bytes"] for file in self._files)
        here = sum(file["at"] for file in self._files)
        rate = self.received / max(1e-3, time.monotonic() - self._began)
        filled = round(_BAR * here / whole) if whole else _BAR
        left = words.duration((whole - here) / rate) if rate else "?"
        share = 100 * here / whole if whole else 100
        bar = "█" * filled + "·" * (_BAR - filled)
        sizes = f"{words.size(here)} of {words.size(whole)}  {words.size(rate)}/s"
        return f"{bar} {share:.0f} %  {sizes}  {left} left"


def _plain(path: str) -> str:
    """A path that the agent sent, if it stays below our folder."""
    parts = path.split("/")
    if not path or path == LABEL or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ProtocolError(f"the agent names a file that is no plain path: {path!r:.80}")
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _read(path: Path) -> Json:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(path: Path, value: Json) -> None:
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    aside.replace(path)
