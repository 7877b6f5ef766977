"""Records what a real `nvidia-smi` says, idle and under load, so that the parser's tests replay real drivers.

    python tests/record_nvidia_smi.py OUT.json [--seconds 4]

Needs a GPU; the load is a matrix product by torch in a process of its own. What tells one card, machine or
person from another is blanked; a recording lies in tests/golden/nvidia-smi. The file is
`{"made": …, "idle": {"nvidia-smi -q -x": {"code": 0, "seconds": …, "text": …}, …}, "busy": {…}}`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "remote_payload"))

from agent import gpu, gpu_health

LOAD = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("running", flush=True)
while True:
    a @ a
    torch.cuda.synchronize()
"""
APPLICATIONS = [
    "nvidia-smi",
    "--query-compute-apps=pid,process_name,used_memory",
    "--format=csv,noheader,nounits",
]
DEVICE_FILES = ["sh", "-c", "ls -l /dev | grep nvidia"]
FORMS = [
    *(list(gpu.table(dialect)) for dialect in range(len(gpu._DIALECTS))),
    list(gpu_health.LONG),
    ["nvidia-smi"],
    ["nvidia-smi", "-q"],
    ["nvidia-smi", "-L"],
    ["nvidia-smi", "--version"],
    ["nvidia-smi", "topo", "-m"],
    APPLICATIONS,
    ["cat", "/proc/driver/nvidia/version"],
    DEVICE_FILES,
]
_NAMES = r"serial|guid|pdi|board[ _]id|part[ _]number|host[ _]id|certificate"
BLANKED = (
    (
        re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"),
        "00000000-0000-0000-0000-000000000000",
    ),
    (re.compile(rf"(?i)((?:{_NAMES})[\w ]*[:>][ \t]*)(?!N/A\b)[^\s<]+"), r"\g<1>0"),  # `-q` and `-q -x` alike
    (re.compile(r"\([^\s()]+@[^\s()]*\)"), "(user@host)"),  # who built the kernel's module
    (re.compile(r"/home/[^/\s]+"), "/home/user"),
)


def blanked(text: str) -> str:
    for pattern, blank in BLANKED:
        text = pattern.sub(blank, text)
    return text


def record() -> dict[str, dict[str, object]]:
    found = {}
    for argv in FORMS:
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        found[" ".join(argv)] = {
            "code": done.returncode,
            "seconds": round(time.monotonic() - began, 3),
            "text": blanked(done.stdout + done.stderr),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load before the second look (4)")
    args = parser.parse_args()
    idle = record()
    load = subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE)
    try:
        assert load.stdout is not None
        if not load.stdout.readline():
            sys.exit("the load ended before it ran: is torch a CUDA build, is a GPU there?")
        time.sleep(args.seconds)
        busy = record()
    finally:
        load.kill()
        load.wait()
    made = time.strftime("%Y-%m-%d", time.gmtime())
    args.out.write_text(json.dumps({"made": made, "idle": idle, "busy": busy}, indent=1) + "\n")
    print(f"{args.out}: {len(FORMS)} forms, idle and busy")


if __name__ == "__main__":
    main()
