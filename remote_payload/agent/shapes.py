"""A run's files are written by others: what is not of its kind is left out, and no reader breaks on it."""

from __future__ import annotations

import math
from typing import Any

# A shape is a kind (float stands for any finite number), a list of one shape, or an object whose named
# values have shapes; an object's other values pass as they are.
_PLACE = {"run": str, "step": float, "path": str}
_SIDES = {"targets": float, "drafters": float}
_COSTS = {"target": float, "drafter": float}
AGAIN = {"limit": float, "backoff_s": float}
RECORD = {
    "id": str,
    "created": float,
    "release": str,
    "recipe": str,
    "resume_from": _PLACE,
    "gpus": {"count": float, "names": {}, "driver": str},
    "secrets": [str],
    "notify": {"when": [str], "addresses": float},
}
STATE = {
    "pid": int,
    "phase": str,
    "detail": str,
    "last_checkpoint": _PLACE,
    "notes": [str],
    "kernels": {"slow": [str]},
    "compile": {
        "count": float,
        "seconds": float,
        "active": bool,
        "moved_at": float,
        "budget_s": float,
        "fallbacks": [str],
    },
    "topology": str,
    "pipeline": {
        **dict.fromkeys(("split", "starving", "advice"), str),
        "gain": float,
        "wait": _SIDES,
        "row_s": _COSTS,
    },
    **dict.fromkeys(("phase_since", "training_since", "heartbeat", "progress_at"), float),
    **dict.fromkeys(("step", "steps", "step_time_s", "tokens_per_s", "loss", "tau"), float),
}
METRICS = {
    **dict.fromkeys(("step", "time", "loss", "lr", "grad_norm", "tokens", "step_s", "tau"), float),
    "compile": bool,
}
NOTIFY = {
    "pid": int,
    "when": [str],
    "sent": [{"word": str, "at": float}],
    "failed": {"word": str, "at": float, "texts": [str]},
}
ATTEMPTS = {
    "limit": float,
    "restarted": float,
    "given_up": str,
    "crashes": [
        {
            **dict.fromkeys(("at", "step", "code", "again_at"), float),
            **dict.fromkeys(("signal", "says", "failure"), str),
            "resume": {"step": float, "path": str},
        }
    ],
}
STOP = {"at": float, "reason": str, "operator": {"user": str, "host": str}}
EXIT = {"at": float, "code": float, "signal": str, "reason": str, "detail": str}


def sound(value: Any, shape: Any) -> Any:
    """`value` without the parts that are not of their kind; None when it is not of its own."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return None
        return {key: sound(each, shape[key]) if key in shape else each for key, each in value.items()}
    if isinstance(shape, list):
        if not isinstance(value, list):
            return None
        return [each for each in (sound(each, shape[0]) for each in value) if each is not None]
    if isinstance(value, bool) and shape is not bool:
        return None
    if shape is float:
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None
    return value if isinstance(value, shape) else None
