"""Slow kernels are found while the old run still lives: nothing is stopped or switched before the proof.

The trainer proves them again when it starts, on the device as it then is; here a refusal costs nothing.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from agent import cache, gpu, interpreter
from agent.call import Args, Call, Json, Refusal

ALLOW: Args = {"allow_slow_kernels": (bool, False, "go on although only reference kernels are there")}
TIMEOUT_S = 300.0  # imports from a cold disk, and a minute of tuning where no cache is
NO_ROOM = 3  # exit code of `trainer.kernels`: the GPU is too full to try


def check(call: Call, python: str, release_dir: str, name: str, overrides: Any, described: Json) -> list[str]:
    """What a recipe's target would call, a text for each role; refuses with `kernels` when that is slow.

    Empty where there is nothing to prove: no GPU, a dense target, slow kernels allowed, a release that has
    no proof. A GPU that is too full beside the run that still lives gives a note.
    """
    if call.args["allow_slow_kernels"] or not described.get("hybrid"):
        return []
    gpus = gpu.query(call.roots.run)
    if gpus["status"] == "absent" or not os.path.isfile(os.path.join(release_dir, "trainer", "kernels.py")):
        return []
    if gpus["status"] == "timeout":  # a proof would hang as nvidia-smi does
        call.frames.note("the kernels are not proven now: nvidia-smi does not answer; invoke doctor")
        return []
    key = cache.make_key(interpreter.versions(python), gpus, release_dir)
    folder = cache.choose(call.roots, key, False, call.nonce)["dir"]  # the run finds it tuned
    call.frames.note("proving the target's kernels on the GPU: two minutes when they are not compiled yet")
    found = prove(python, release_dir, name, overrides, folder, TIMEOUT_S)
    if "no_room" in found:
        call.frames.note(f"the kernels are not proven now, the run will do it: {found['no_room']}")
        return []
    lines = [line for report in found["reports"] for line in report["lines"]]
    for line in lines:
        if not line["fast"]:
            raise Refusal(
                "kernels",
                f"the target's {line['role']} would run on {line['function']}: {line['why']}",
                f"{line['mend']}; --allow-slow-kernels goes on without",
                lines=lines,
            )
    return list(dict.fromkeys(_text(line) for line in lines))


def prove(python: str, release_dir: str, name: str, overrides: Any, cache_dir: str, timeout_s: float) -> Json:
    """`{reports[], seconds}` of `trainer.kernels` for a recipe, or `{no_room}` with the reason.

    A proof that cannot be made is a `kernels` refusal.
    """
    argv = ["-m", "trainer.kernels", name, "--overrides", json.dumps(overrides), "--json"]
    began = time.monotonic()
    done = interpreter.run_python(python, argv, release_dir, timeout_s, cache.environment(cache_dir))
    took = round(time.monotonic() - began, 3)
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    try:
        answer: Json = json.loads(printed[-1])
    except (ValueError, IndexError):
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise Refusal("kernels", said[-1] if said else f"the proof ended with {done.returncode}") from None
    if done.returncode == NO_ROOM:
        return {"no_room": str(answer.get("error"))}
    if not answer.get("ok"):
        raise Refusal("kernels", str(answer.get("error")))
    return {"reports": answer["reports"], "seconds": took}


def _text(line: Json) -> str:
    fast, reference = line.get("milliseconds"), line.get("reference_milliseconds")
    gain = ""
    if fast and reference:  # attention's reference may be faster on equal documents, it plans for each length
        times, both = reference / fast, f"{fast:.2f} ms, the reference {reference:.2f}"
        gain = f", {times:.1f} times the reference" if times >= 1 else f", {both}"
    unused = f"; {line['why']}" if line.get("why") else ""  # installed, and of no use
    return f"{line['role']} by {line['function']}{gain}{unused}"
