"""What only the Proxmox host can tell about a container, asked in one shell call before the container is.

The script needs `sh` and coreutils; each fact is a line `NONCE name text`, so that a login banner, or a
warning of Perl about locales, is none.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from controller.deadline import Deadline
from controller.transport import Link

Json = dict[str, Any]

_LOOK = Deadline(total=60.0)
_XIDS = 20  # lines

# `pct status` is the one Perl program in it (0.6 s); versions come from dpkg: `pveversion` is another.
SCRIPT = r"""
n=$1 vmid=$2 sudo=$3
say() { while IFS= read -r line; do printf '%s %s %s\n' "$n" "$1" "$line"; done; }
date +%s.%N | say now
id -u | say uid
command -v pct | say pct
for package in pve-manager pve-container lxc-pve; do
    version=$(dpkg-query -W -f '${Version}' "$package" 2>/dev/null) && echo "$package $version" | say package
done
cat /sys/module/nvidia/version 2>/dev/null | say driver
for gpu in /proc/driver/nvidia/gpus/*; do [ -d "$gpu" ] && echo "${gpu##*/}" | say gpu; done
cut -d' ' -f1 /proc/uptime | say uptime
if dmesg >/dev/null 2>&1; then echo yes | say dmesg; fi
dmesg 2>/dev/null | grep -a 'NVRM: Xid' | tail -n 20 | say xid
said=$($sudo pct status "$vmid" --verbose 2>&1 </dev/null)
echo "$?" | say status-code
printf '%s\n' "$said" | say status
echo yes | say end
"""


@dataclass(frozen=True)
class Look:
    """`facts` by name, each a list of lines; `skew_s` is host clock minus ours, known to `skew_error_s`."""

    facts: dict[str, list[str]]
    skew_s: float | None
    skew_error_s: float

    def first(self, name: str) -> str:
        return next(iter(self.facts.get(name, [])), "")

    def as_json(self) -> Json:
        """For `--json` and for the checks: plain data."""
        status = dict(_pairs(self.facts.get("status", [])))
        code = self.first("status-code")
        return {
            "whole": "end" in self.facts,
            "skew_s": self.skew_s,
            "skew_error_s": self.skew_error_s,
            "uid": int(self.first("uid")) if self.first("uid").isdigit() else None,
            "pct": self.first("pct") or None,
            "packages": dict(line.split(" ", 1) for line in self.facts.get("package", []) if " " in line),
            "driver": self.first("driver") or None,
            "gpus": self.facts.get("gpu", []),
            "uptime_s": _float(self.first("uptime")),
            "dmesg": "dmesg" in self.facts,
            "xids": self.facts.get("xid", []),
            "status_code": int(code) if code.isdigit() else None,
            "status": status.get("status"),
            "lock": status.get("lock"),
            "status_text": "\n".join(self.facts.get("status", []))[-2000:],
        }


def look(link: Link) -> Look:
    """Run the script over an open connection. Raises Unreachable."""
    endpoint, nonce = link.endpoint, secrets.token_hex(8)
    sudo = "sudo -n" if endpoint.sudo else ""
    command = shlex.join(["sh", "-s", "--", nonce, str(endpoint.vmid), sudo])
    heard = bytearray()
    arrived: list[float] = []
    first = f"{nonce} now ".encode()

    def hear(chunk: bytes) -> None:
        heard.extend(chunk)
        if not arrived and first in heard:
            arrived.append(time.time())

    began = time.time()
    link.run(command, feed=[SCRIPT.encode()], on_stdout=hear, on_stderr=lambda chunk: None, deadline=_LOOK)
    facts = parse(bytes(heard).decode("utf-8", "replace"), nonce)
    now = _float(next(iter(facts.get("now", [])), ""))
    ended = arrived[0] if arrived else time.time()
    skew = None if now is None else now - (began + ended) / 2
    return Look(facts, skew, (ended - began) / 2)


def parse(text: str, nonce: str) -> dict[str, list[str]]:
    """The lines of each fact; everything else is noise."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        mark, _, rest = line.partition(" ")
        name, _, said = rest.partition(" ")
        if mark == nonce and name:
            facts.setdefault(name, []).append(said)
    return facts


def _pairs(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        key, colon, value = line.partition(": ")
        if colon:
            yield key.strip(), value.strip()


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
