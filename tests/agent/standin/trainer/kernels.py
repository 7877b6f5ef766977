"""Answers like the real proof; what it says is in the overrides, because there is no GPU to prove it on."""

import json
import os
import sys

overrides = json.loads(sys.argv[sys.argv.index("--overrides") + 1])
answer = overrides.get("proof") or {"ok": True, "reports": []}
print("a library says something first")
if answer == "dies":
    raise RuntimeError("no CUDA device is usable")
answer.setdefault("seen", os.environ.get("TRITON_CACHE_DIR"))
print(json.dumps(answer))
sys.exit(overrides.get("proof_code", 0))
