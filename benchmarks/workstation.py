"""A person's folder with an inventory and a payload of its own, and `pctrun` typed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PROGRAM = (sys.executable, "-c", "from controller.program import main; main()")


class Workstation:
    """`box` is the one entry of its inventory; what it sees of runs lies in `folder`/.pctrun.
    Commands are processes of their own.
    """

    def __init__(self, folder: Path, box: dict[str, Any]) -> None:
        self.folder, self.payload = folder, folder / "remote_payload"
        folder.mkdir(parents=True)
        document = json.dumps({"default": "lab", "boxes": {"lab": box}})
        (folder / "inventory.yaml").write_text(document)  # JSON is YAML

    def start(self, *words: str, **streams: Any) -> subprocess.Popen[str]:
        """`pctrun WORDS`, going on; no stdin, and streams as Popen takes them."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PCTRUN_")}
        return subprocess.Popen(
            [*_PROGRAM, *words],
            cwd=self.folder,
            env={**kept, "PYTHONPATH": str(ROOT), "LOGNAME": self.folder.name},
            text=True,
            **{"stdin": subprocess.DEVNULL, **streams},
        )

    def type(self, *words: str, codes: tuple[int, ...] = (0,), timeout_s: float = 300) -> str:
        """What it printed; ends the program with what was said when the exit code is none of `codes`."""
        done = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = done.communicate(timeout=timeout_s)
        if done.returncode not in codes:
            sys.exit(f"pctrun {' '.join(words)}: exit {done.returncode}\n{out}{err}")
        return out


def as_real(host: str, port: int, key: Path, host_key: str, vmid: int, python: str) -> dict[str, Any]:
    """The inventory's entry for the embedded box, reached as a Proxmox host is."""
    return {
        "host": host,
        "port": port,
        "identity_file": str(key),
        "host_key": host_key,
        "vmid": vmid,
        "agent_python": python,
        "python": python,
        "recipe": "tiny",
    }
