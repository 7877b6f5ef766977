"""Where a watch is shown: a screen drawn over and over, or without a terminal a line at each change."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any, Protocol

from controller import attempts, progress, render, sparkline, words
from controller.verdict import Verdict
from controller.watch_state import Seen

Json = dict[str, Any]

PLAIN_S = 30.0  # without a terminal: seconds between two lines that say the same
_LEAST_COLUMNS, _LEAST_LINES = 40, 10
_SPARK = 60  # columns
_SHARES = 8  # threads by name; more are summed up by kind


class View(Protocol):
    def show(self, label: str, verdict: Verdict, seen: Seen) -> None: ...

    def close(self) -> None: ...


class Screen:
    """The terminal's alternate screen; what stood there before comes back on `close`."""

    def __init__(self) -> None:
        self._open = False

    def show(self, label: str, verdict: Verdict, seen: Seen) -> None:
        if not self._open:
            self._write("\x1b[?1049h\x1b[?25l")
            self._open = True
        size = shutil.get_terminal_size()
        columns, lines = max(_LEAST_COLUMNS, size.columns), max(_LEAST_LINES, size.lines)
        text = screen(label, verdict, seen, width=min(columns, 160), height=lines - 1)
        text = render.paint(text, verdict.word)
        self._write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in text.split("\n")) + "\x1b[J")

    def close(self) -> None:
        if self._open:
            self._write("\x1b[?25h\x1b[?1049l")
            self._open = False

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Lines:
    """A line for each new verdict, and one now and then."""

    def __init__(self) -> None:
        self._word, self._at = "", 0.0

    def show(self, label: str, verdict: Verdict, seen: Seen) -> None:
        now = time.monotonic()
        if verdict.word == self._word and now - self._at < PLAIN_S:
            return
        self._word, self._at = verdict.word, now
        lost = verdict.word == "unreachable"  # one that answers tells its reasons in `status`
        line = render.among_others if lost else render.one_line
        print(line(label, verdict, seen.snapshot), flush=True)

    def close(self) -> None:
        pass


class Nothing:
    """For `--json`."""

    def show(self, label: str, verdict: Verdict, seen: Seen) -> None:
        pass

    def close(self) -> None:
        pass


def choose(capture: bool) -> View:
    if capture:
        return Nothing()
    return Screen() if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else Lines()


def screen(label: str, verdict: Verdict, seen: Seen, *, width: int = 100, height: int = 40) -> str:
    """The status screen with curves and shares, its log tail as long as there is room."""
    return render.screen(
        label, verdict, seen.snapshot, more=_curves(seen, width), width=width, height=height, tail=height
    )


def _curves(seen: Seen, width: int) -> list[str]:
    lines = []
    for name, points, form in (
        ("loss", seen.loss, "{:.3f}"),
        ("tok/s", seen.rate, "{:.0f}"),
        ("τ", seen.tau, "{:.2f}"),
    ):
        known = list(points)
        if len(known) > 1:
            first, last = form.format(known[0][1]), form.format(known[-1][1])
            ends = f"  {first} → {last}"
            drawn = sparkline.line(known, max(1, min(_SPARK, width - 11 - len(ends))))
            lines.append(f"  {name:<9}{drawn}{ends}")
    shares = _shares(attempts.steps((seen.snapshot or {}).get("run") or {})[1])
    if shares:
        lines.append(f"  {'busy':<9}{shares}")
    return lines


def _shares(metrics: list[Json]) -> str:
    """How busy each thread was over the last steps: the one near 100 % is what the others wait for."""
    sums: dict[str, list[float]] = {}
    for line in metrics[-progress.WINDOW :]:
        busy = line.get("busy")
        for name, share in busy.items() if isinstance(busy, dict) else ():
            if isinstance(share, int | float):
                sums.setdefault(name, []).append(share)
    means = {name: sum(values) / len(values) for name, values in sums.items()}
    if len(means) <= _SHARES:
        return "   ".join(f"{name} {100 * share:.0f} %" for name, share in means.items())
    kinds: dict[str, list[float]] = {}
    for name, share in means.items():
        kinds.setdefault(name.rstrip("0123456789").rstrip(" -_/"), []).append(share)
    texts = []
    for kind, shares in kinds.items():
        low, high = 100 * min(shares), 100 * max(shares)
        span = f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f}–{high:.0f} %"
        texts.append(f"{words.plural(len(shares), kind)} {span}")
    return "   ".join(texts)
