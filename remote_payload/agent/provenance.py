"""All that made a run what it was, written once before it starts: whoever compares two runs reads it here."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from agent import environments, interpreter, releases
from agent.call import Json
from agent.files import read_json, write_json

NAME = "provenance.json"


def record(run_dir: str, release_dir: str, python: str, recipe: Json, gpus: Json) -> None:
    """Write `provenance.json`: source, recipe with every value, every package, GPUs, machine; `env` is the
    `{id, name}` of the environment of `env.build`, null for an interpreter from elsewhere.

    It lies beside `run.json` and not in it, because every `status` carries that one.
    """
    packages = interpreter.packages(python)
    lock = json.dumps(packages, sort_keys=True).encode()
    facts: dict[str, Any] = {
        "schema": 1,
        "source": source(release_dir),
        "recipe": recipe.get("values"),
        "packages": packages,
        "environment": hashlib.sha256(lock).hexdigest()[:16],
        "env": environments.of_python(python),
        "gpus": gpu_facts(gpus),
        "machine": _machine(),
    }
    write_json(os.path.join(run_dir, NAME), facts)


def read(run_dir: str) -> Json | None:
    return read_json(os.path.join(run_dir, NAME))


def source(release_dir: str) -> Json | None:
    """`{commit, dirty}` that the release was deployed from, when the workstation knew it."""
    found = (read_json(os.path.join(release_dir, releases.MANIFEST)) or {}).get("source")
    return found if isinstance(found, dict) else None


def note_source(release_dir: str, given: Any) -> None:
    """A deploy of the same content from a clean commit names the release better than a dirty tree did."""
    known = source(release_dir)
    better = isinstance(given, dict) and bool(given.get("commit")) and not given.get("dirty")
    if not better or (known and not known.get("dirty")):
        return
    path = os.path.join(release_dir, releases.MANIFEST)
    manifest = read_json(path)
    if manifest is not None:
        write_json(path, {**manifest, "source": given})


def gpu_facts(gpus: Json) -> Json:
    """`{status, count, names{model: count}, driver}` of the table of GPUs."""
    rows = gpus.get("rows") or []
    names = [str(row.get("name")) for row in rows]
    drivers = sorted({str(row.get("driver")) for row in rows})
    return {
        "status": gpus.get("status"),
        "count": len(rows),
        "names": {name: names.count(name) for name in sorted(set(names))},
        "driver": drivers[0] if len(drivers) == 1 else None,
    }


def _machine() -> Json:
    facts = os.uname()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kernel = f"{facts.sysname} {facts.release}"
    return {"hostname": facts.nodename, "kernel": kernel, "cpus": os.cpu_count(), "memory_bytes": memory}
