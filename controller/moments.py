"""A moment as a person types it: so long ago, or a time of day."""

from __future__ import annotations

import datetime
import re

from controller.errors import Usage

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def since(text: str, now: datetime.datetime | None = None) -> dict[str, float]:
    """`{"since_s": 600}` for `10m`, `{"since_at": epoch}` for `14:10` or `2026-11-30T14:10`, both UTC.

    An age is counted by the container's clock. A time of day that is still to come was yesterday.
    """
    text = text.strip()
    ages = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if ages:
        return {"since_s": float(ages[1]) * _UNITS[ages[2]]}
    now = now or datetime.datetime.now(datetime.UTC)
    day = re.fullmatch(r"(\d{1,2}):(\d\d)(?::(\d\d))?", text)
    try:
        if day:
            clock = datetime.time(int(day[1]), int(day[2]), int(day[3] or 0), tzinfo=datetime.UTC)
            moment = datetime.datetime.combine(now.date(), clock)
            if moment > now:
                moment -= datetime.timedelta(days=1)
        else:
            moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise Usage(f"--since '{text}' is no moment", "90s, 10m, 2h, 1d, 14:10 or 2026-11-30T14:10") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return {"since_at": moment.timestamp()}
