"""A trained drafter leaves the container as a stream that goes on at the byte where a cut left it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import IO, Any

from agent import metrics, runs
from agent.call import Args, Call, Json, Refusal, Roots
from agent.files import read_json
from agent.frames import Frames

ARGS: Args = {
    "run": (str, None, "run id; without it the newest"),
    "what": (str, "auto", "export, last, best, a step; auto: the export, else the last checkpoint"),
    "have": (dict, {}, "what is there already: {source: {path: {bytes, mtime_ns, got}}}"),
}
CHUNK = 1024 * 1024


def run(call: Call) -> Json:
    """A `part` that names the files, then their bytes as `out` frames in that order, then their hashes.

    `source` names the folder below the run; a file goes out from byte `from`: what the other side has of the
    same version of it. Every file is opened first, so a checkpoint that is retired meanwhile arrives whole.
    """
    chosen = runs.named(call.roots, call.args["run"])
    run_dir = runs.folder(call.roots, chosen)
    folder, step, tau = _choose(call.roots, chosen, call.args["what"])
    source = f"{chosen}/{os.path.relpath(folder, run_dir)}"
    known = call.args["have"].get(source)
    with contextlib.ExitStack() as stack:
        files = [_File(path, stack, known) for path in _paths(folder)]
        listed = [file.listed() for file in files]
        call.frames.part({"run": chosen, "source": source, "step": step, "tau": tau, "files": listed})
        hashes = {file.path: file.send(call.frames) for file in files}
    _compare(folder, hashes)
    record = read_json(os.path.join(run_dir, "run.json")) or {}
    return {
        "run": chosen,
        "source": source,
        "step": step,
        "tau": tau,
        "files": [{**each, "sha256": hashes[each["path"]]} for each in listed],
        "made_by": {key: record.get(key) for key in ("recipe", "overrides", "release", "config_hash")},
    }


def _compare(folder: str, hashes: dict[str, str]) -> None:
    """Refuse what arrived whole but is not what the trainer wrote; an export has no hashes."""
    proof = (read_json(os.path.join(folder, "complete.json")) or {}).get("files")
    for name, facts in proof.items() if isinstance(proof, dict) else ():
        if name in hashes and isinstance(facts, dict) and facts.get("sha256") != hashes[name]:
            raise Refusal(
                "verify",
                f"{os.path.basename(folder)} is damaged in the container: the checksum of {name} differs",
                "invoke fetch RUN --checkpoint STEP with an earlier one; invoke runs.show RUN lists them",
            )


class _File:
    """One open file of a folder; `at` is the byte from which it has to be sent."""

    def __init__(self, place: tuple[str, str], stack: contextlib.ExitStack, known: Any) -> None:
        self.path, full = place
        try:
            file = open(full, "rb", buffering=0)  # noqa: SIM115 - closed by the stack
        except OSError as error:
            raise Refusal("no-run", f"{full} cannot be read: {error.strerror}", "fetch again") from None
        self.file: IO[bytes] = stack.enter_context(file)
        facts = os.fstat(self.file.fileno())
        self.bytes, self.mtime_ns = facts.st_size, facts.st_mtime_ns
        mine = known.get(self.path) if isinstance(known, dict) else None
        same = isinstance(mine, dict) and (mine.get("bytes"), mine.get("mtime_ns")) == (
            self.bytes,
            self.mtime_ns,
        )
        got = mine.get("got") if same and isinstance(mine, dict) else 0
        self.at = min(got, self.bytes) if isinstance(got, int) and got > 0 else 0

    def listed(self) -> Json:
        return {"path": self.path, "bytes": self.bytes, "mtime_ns": self.mtime_ns, "from": self.at}

    def send(self, frames: Frames) -> str:
        """Send the rest of it; its sha256, over the part that was there already, too."""
        digest, left = hashlib.sha256(), self.bytes
        while left:
            block = self.file.read(min(CHUNK, left))
            if not block:
                raise Refusal("internal", f"{self.path} became shorter while it was read", "fetch again")
            digest.update(block)
            done = self.bytes - left
            left -= len(block)
            if done + len(block) > self.at:
                frames.out(block[max(0, self.at - done) :])
        return digest.hexdigest()


def _choose(roots: Roots, name: str, what: str) -> tuple[str, int | None, float | None]:
    """The folder that `what` names, its step, its τ."""
    run_dir = runs.folder(roots, name)
    export = os.path.join(run_dir, "export")
    if what == "export" or (what == "auto" and os.path.isdir(export)):
        if not os.path.isdir(export):
            raise Refusal(
                "no-run", f"{name} has no export: it is written when a run finishes", _instead(run_dir)
            )
        last = metrics.evaluations(run_dir)[-1:]
        return export, last[0]["step"] if last else None, last[0]["tau"] if last else None
    whole = {each.step: each.path for each in runs.checkpoints(run_dir)}
    if not whole:
        point = runs.resume_point(roots, name)
        hint = f"it stands on {point['run']}: invoke fetch {point['run']}" if point else "invoke status"
        raise Refusal("no-run", f"{name} has no checkpoint", hint)
    taus = {each["step"]: each["tau"] for each in metrics.evaluations(run_dir)}
    if what in ("auto", "last"):
        step = max(whole)
    elif what == "best":
        step = _best(name, whole, taus)
    elif what.isdigit() and int(what) in whole:
        step = int(what)
    else:
        shown = ", ".join(map(str, sorted(whole)))
        raise Refusal("usage", f"{name} has no checkpoint {what!r}", f"best, last, export, or one of {shown}")
    return whole[step], step, taus.get(step)


def _best(name: str, whole: dict[int, str], taus: dict[int, float]) -> int:
    """The checkpoint with the highest τ; refuses when none of those that are kept was evaluated."""
    known = {step: taus[step] for step in whole if step in taus}
    if known:
        return max(known, key=lambda step: (known[step], step))
    kept = ", ".join(map(str, sorted(whole)))
    hint = "--checkpoint last; a train.eval_every that divides train.checkpoint_every gives each one its τ"
    raise Refusal("usage", f"no checkpoint of {name} was evaluated (kept: {kept})", hint)


def _instead(run_dir: str) -> str:
    whole = runs.checkpoints(run_dir)
    return f"--checkpoint last is step {whole[-1].step}" if whole else "it has no checkpoint either"


def _paths(folder: str) -> list[tuple[str, str]]:
    """Every file below `folder` as (path with /, full path), by name."""
    found = []
    for base, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(base, name)
            found.append((os.path.relpath(full, folder).replace(os.sep, "/"), full))
    return sorted(found)
