"""The sandbox's `pct`: answers as a Proxmox host does; free of slow imports, because every call pays them.

Nothing here imports the rest of the controller, so that the command can run with `python -I -S`.
"""
