"""Whether a box's references lead to values on this workstation: a start would refuse where one does not."""

from __future__ import annotations

from controller import checks, secrets
from controller.checks import Check
from controller.errors import PreflightFailed
from controller.inventory import Box

HERE = "here"


def here(box: Box) -> list[Check]:
    """One check for `secrets:` and one for `notify:`, where the box has them. The values are dropped."""
    made = []
    if box.secrets:
        made.append(_read("secrets", box, f"{', '.join(box.secrets)} can be read"))
    if box.notify:
        sends = "the run's own notifier" if box.notify.by == "container" else "invoke watch --notify"
        number = len(box.notify.urls)
        count = "1 address" if number == 1 else f"{number} addresses"
        made.append(
            _read("notify", box, f"{count} can be read; {sends} tells of {', '.join(box.notify.when)}")
        )
    return made


def _read(name: str, box: Box, says: str) -> Check:
    try:
        secrets.environment(box) if name == "secrets" else secrets.urls(box)
    except PreflightFailed as error:
        return checks.failed(HERE, name, "; ".join([error.message, *error.evidence]), error.hint)
    return checks.ok(HERE, name, says)
