"""`invoke watch --notify`: this machine tells of a run, where the run's own notifier has not done so."""

from __future__ import annotations

import threading
import time
from typing import Any

from controller import notify_send, secrets
from controller.console import Console
from controller.errors import PreflightFailed, Usage
from controller.inventory import Box
from controller.notify_rules import REARM_S, Changes, message
from controller.verdict import Verdict

Json = dict[str, Any]

HOLD_S = 10.0  # for the run's own notifier to be first
_LAST_S = 20.0  # for messages that are on their way when the watch ends
_CANNOT = "pip install apprise, or use a plain webhook: json://HOST/PATH"


class Teller:
    """Watches what a watch shows. `take` returns at once: messages leave in threads of their own."""

    def __init__(self, box: Box) -> None:
        """Raises Usage for a box that names no address, PreflightFailed for one that cannot be used."""
        if box.notify is None:
            mend = "notify: {urls: [env:NAME]} in its inventory entry"
            raise Usage(f"box '{box.name}' names no address to notify", mend)
        self._label, self._when, self._urls = box.label, box.notify.when, secrets.urls(box)
        unusable = notify_send.unusable(self._urls)
        if unusable:
            raise PreflightFailed(unusable[0], _CANNOT, evidence=unusable[1:])
        self._hide = secrets.readable(box)
        self._run: str | None = None
        self._changes = Changes(self._when)
        self._held: list[tuple[float, str, Json]] = []  # since, word, message
        self._threads: list[threading.Thread] = []
        self.sent: list[str] = []
        self.failed: list[str] = []

    def take(self, verdict: Verdict, snapshot: Json | None) -> None:
        """One look. What was so at the first one is no news; a run that starts later is new altogether."""
        run = (snapshot or {}).get("run") or {}
        now = time.monotonic()
        if run.get("id") and run["id"] != self._run:
            known = verdict.word if self._run is None else "starting"
            self._run, self._changes = run["id"], Changes(self._when, known)
        if self._changes.take(verdict, snapshot, now):
            self._held.append((now, verdict.word, message(self._label, verdict, snapshot, self._hide)))
        self._held = [each for each in self._held if not _told(each[1], snapshot)]
        attended = any(each.get("role") == "notifier" for each in run.get("processes") or [])
        due = [each for each in self._held if not attended or now - each[0] > HOLD_S]
        self._held = [each for each in self._held if each not in due]
        for _, word, what in due:
            self._send(word, what)

    def finish(self) -> None:
        """Send what was held, and wait for what is on its way."""
        for _, word, what in self._held:
            self._send(word, what)
        self._held = []
        ends = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def report(self, console: Console) -> Json:
        """What came of it, for `--json`; what did not get out is said, too."""
        if self.sent:
            console.note(f"told of {', '.join(self.sent)}")
        for text in self.failed:
            console.note(f"a message did not get out: {text}")
        return {"sent": list(self.sent), "failed": list(self.failed)}

    def _send(self, word: str, what: Json) -> None:
        def work() -> None:
            failures = notify_send.send(self._urls, what)
            self.failed += failures
            if len(failures) < len(self._urls):
                self.sent.append(word)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)


def _told(word: str, snapshot: Json | None) -> bool:
    """Whether the run's own notifier has told the same; both times are of the container's clock."""
    told = ((snapshot or {}).get("run") or {}).get("notify") or {}
    now = (snapshot or {}).get("now") or 0.0
    return any(
        each.get("word") == word and now - (each.get("at") or 0.0) < REARM_S
        for each in told.get("sent") or []
    )
