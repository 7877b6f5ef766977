"""The arguments and the words of a stop, which `abort` and `restart` share."""

from __future__ import annotations

from typing import Any

from controller import gpu_words, words
from controller.inventory import Box

GPU_WAIT_S = 60.0


def args(box: Box, *, run: str = "", reason: str = "") -> dict[str, Any]:
    """The stop part of a request: the newest run unless one is named."""
    return {
        "run": run or None,
        "grace_s": box.grace_s,
        "gpu_wait_s": GPU_WAIT_S,
        "reason": reason or None,
    }


def did_nothing(result: dict[str, Any]) -> bool:
    return bool(result["outcome"] == "nothing-to-stop")


def text(result: dict[str, Any]) -> str:
    """What a stop did, in one line and one more for each thing that stayed."""
    if did_nothing(result):
        run = result.get("run")  # the one that was named, else the newest: others may be alive
        return f"nothing to stop: {f'{run} is not running' if run else 'there is no run yet'}"
    lines = [f"{result['outcome']} {result['run']}{_at(result)}{_saved(result)}{_took(result)}"]
    killed = result.get("killed") or []
    if killed:
        lines.append(f"  killed after the grace: {', '.join(_process(entry) for entry in killed)}")
    gpus = result.get("gpus") or []
    for gpu in gpus:
        if gpu["back"] is False:
            holders = ", ".join(_process(entry) for entry in gpu.get("holders") or []) or "nobody we can see"
            lines.append(
                f"  GPU {gpu['index']} still has {gpu.get('used_mib')} MiB in use, held by {holders}"
            )
    unknown = [gpu for gpu in gpus if gpu["back"] is None]
    if unknown:
        why = "nvidia-smi tells it no more, so whether it is back is unknown: invoke doctor"
        lines.append(f"  memory of GPU {gpu_words.indices(unknown)}: {why}")
    survivors = result.get("survivors") or []
    if survivors:
        lines.append(
            f"  still alive, which needs a look: {', '.join(_process(entry) for entry in survivors)}"
        )
    return "\n".join(lines)


def _at(result: dict[str, Any]) -> str:
    return "" if result.get("step") is None else f" at step {result['step']}"


def _saved(result: dict[str, Any]) -> str:
    checkpoint = result.get("checkpoint")
    if not checkpoint:
        return ": it had no checkpoint"
    lost = result.get("lost_steps") or 0
    return f": resumes at step {checkpoint['step']}, {words.plural(lost, 'step')} lost"


def _took(result: dict[str, Any]) -> str:
    return f" ({result['waited_s']:.1f} s)" if result.get("waited_s") is not None else ""


def _process(entry: dict[str, Any]) -> str:
    return f"pid {entry['pid']} ({str(entry.get('command', '?'))[:60]})"
