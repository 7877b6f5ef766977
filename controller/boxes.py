"""List what the inventory names, without looking at any of it."""

from __future__ import annotations

from controller.inventory import Inventory
from controller.outcome import Outcome


def table(inventory: Inventory, names: list[str]) -> Outcome:
    """One line a box; the default is marked with a star."""
    rows = [("", "box", "where", "recipe", "gpus")]
    boxes = inventory.pick(names) if names else list(inventory.boxes.values())
    document = []
    for box in boxes:
        where = f"sandbox, container {box.vmid}" if box.sandbox else f"{box.host}, container {box.vmid}"
        star = "*" if box.name == inventory.default else ""
        gpus = "–" if box.gpus is None else str(box.gpus)
        rows.append((star, box.name, where, box.recipe, gpus))
        document.append({"name": box.name, "default": bool(star), **box.as_dict()})
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return Outcome({"boxes": document}, "\n".join(line.rstrip() for line in lines))
