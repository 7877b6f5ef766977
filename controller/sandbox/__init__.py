"""The embedded box: a Proxmox host small enough to travel with the project, so that commands run for real."""

from .alive import Living
from .box import Endpoint, SandboxStatus, cut_connections, down, is_up, living, pct_calls, running, status, up
from .errors import SandboxError
from .pct.host import ENGINES
from .place import sandbox_dir

__all__ = [
    "ENGINES",
    "Endpoint",
    "Living",
    "SandboxError",
    "SandboxStatus",
    "cut_connections",
    "down",
    "is_up",
    "living",
    "pct_calls",
    "running",
    "sandbox_dir",
    "status",
    "up",
]
