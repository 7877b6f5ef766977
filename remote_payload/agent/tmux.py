"""tmux is a window for people, never the truth: a socket of its own, away from cleaners of /tmp."""

from __future__ import annotations

import os
import subprocess
from typing import Optional

SOCKET = "pctrun"
LOOK_S = 2.0  # a server that lives answers in milliseconds, and no look may hang on one that is suspended
START_S = 10.0


def has_session(run_root: str, name: str) -> Optional[bool]:
    """Whether the run's session is there; no server and no tmux are a plain no. None: it does not answer."""
    if not os.path.exists(os.path.join(_folder(run_root), f"tmux-{os.getuid()}", SOCKET)):
        return False
    try:
        return _tmux(run_root, LOOK_S, "has-session", "-t", f"={name}").returncode == 0
    except subprocess.TimeoutExpired:
        return None
    except OSError:
        return False


def new_session(run_root: str, name: str, folder: str, argv: list[str]) -> str:
    """Start a detached session that runs `argv` without a shell; returns tmux's complaint or an empty text.

    tmux answers 0 even when the command dies at once (tmux issue 116): look for the process itself.
    """
    os.makedirs(_folder(run_root), mode=0o700, exist_ok=True)
    os.chmod(_folder(run_root), 0o700)
    wish = ["new-session", "-d", "-s", name, "-x", "200", "-y", "50", "-c", folder]
    try:
        done = _tmux(run_root, START_S, *wish, *argv)
    except FileNotFoundError:
        return "tmux is not installed"
    except subprocess.TimeoutExpired:
        return f"tmux did not answer in {START_S:g} s"
    return "" if done.returncode == 0 else done.stderr.decode("utf-8", "replace").strip() or "tmux failed"


def _folder(run_root: str) -> str:
    return os.path.join(run_root, "tmux")


def _tmux(run_root: str, timeout_s: float, *argv: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "TMUX_TMPDIR": _folder(run_root)}
    environment.pop("TMUX", None)
    return subprocess.run(
        ["tmux", "-L", SOCKET, "-f", "/dev/null", *argv],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=timeout_s,
    )
