"""The embedded box: a Proxmox host small enough to travel with the project, so that commands run for real."""

from .box import Endpoint, SandboxStatus, cut_connections, down, sandbox_dir, status, up
from .errors import SandboxError

__all__ = [
    "Endpoint",
    "SandboxError",
    "SandboxStatus",
    "cut_connections",
    "down",
    "sandbox_dir",
    "status",
    "up",
]
