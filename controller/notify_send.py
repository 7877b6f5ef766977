"""A message leaves by apprise; a plain webhook (json://, jsons://) needs none, and says why it failed.

This text also travels to the container, whose environment may lack apprise. Nothing here repeats an address,
or what a library says of it: addresses are secrets.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib.util
import json
import logging
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]

TIMEOUT_S = 4.0  # to connect, and for the answer: what apprise waits, too
PAUSES_S = (1.0, 4.0)  # before the second and the third try
_NO_APPRISE = "needs apprise, which is not installed"
_UNKNOWN = "apprise does not know such an address"
_WEBHOOKS = {"json": "http", "jsons": "https"}


def scheme(url: str) -> str:
    """The part of an address that is no secret."""
    return url.partition("://")[0].lower() if "://" in url else "?"


def needs_apprise(url: str) -> bool:
    """All but plain webhooks: one with parameters means something that only apprise knows."""
    return scheme(url) not in _WEBHOOKS or "?" in url


def has_apprise() -> bool:
    return importlib.util.find_spec("apprise") is not None


def unusable(urls: Sequence[str]) -> list[str]:
    """A line for each address that nothing here could send to; nothing is sent."""
    return [
        f"address {number} ({scheme(url)}://…): {why}"
        for number, url in enumerate(urls, 1)
        if (why := _why_unusable(url))
    ]


def _why_unusable(url: str) -> str:
    if not needs_apprise(url):
        return ""
    if not has_apprise():
        return _NO_APPRISE
    return "" if _apprise(url) is not None else _UNKNOWN


def _apprise(url: str) -> Any:
    """What sends to that address, or None when apprise does not know it."""
    import apprise

    quiet = logging.getLogger("apprise")  # it would print addresses
    quiet.propagate = False
    if not quiet.handlers:
        quiet.addHandler(logging.NullHandler())
    with contextlib.suppress(Exception):  # a plug-in of many hands
        sender = apprise.Apprise()
        return sender if sender.add(url) else None
    return None


def send(urls: Sequence[str], message: Json, *, pauses: Sequence[float] = PAUSES_S) -> list[str]:
    """Send `title body type` to every address; a line for each that did not take it, after all tries."""
    return list(_each(urls, message, pauses))


def _each(urls: Sequence[str], message: Json, pauses: Sequence[float]) -> Iterator[str]:
    for number, url in enumerate(urls, 1):
        why = ""
        for pause in (0.0, *pauses):
            time.sleep(pause)
            why = _by_apprise(url, message) if needs_apprise(url) else _by_webhook(url, message)
            if not why:
                break
        else:
            yield f"address {number} ({scheme(url)}://…): {why}"


def _by_apprise(url: str, message: Json) -> str:
    why = _why_unusable(url)
    if why:
        return why
    with contextlib.suppress(Exception):  # as above
        if _apprise(url).notify(title=message["title"], body=message["body"], notify_type=message["type"]):
            return ""
    return "not delivered"


def _by_webhook(url: str, message: Json) -> str:
    """POST the JSON document that apprise's json:// posts."""
    try:
        place = urllib.parse.urlsplit(url)
        host = f"[{place.hostname}]" if ":" in (place.hostname or "") else place.hostname or ""
        port = f":{place.port}" if place.port else ""
    except ValueError:
        return "not an address"
    headers = {"Content-Type": "application/json", "User-Agent": "pctrun"}
    if place.username:
        login = f"{urllib.parse.unquote(place.username)}:{urllib.parse.unquote(place.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    told = {"version": "1.0", "title": message["title"], "message": message["body"], "attachments": []}
    request = urllib.request.Request(
        f"{_WEBHOOKS[place.scheme]}://{host}{port}{place.path or '/'}",
        json.dumps({**told, "type": message["type"]}).encode(),
        headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"answered {error.code}"
    except (
        OSError,
        ValueError,
        http.client.HTTPException,
    ) as error:  # the last: what answers is no web server
        return _reason(error)


def _reason(error: Exception) -> str:
    """Why, in words that hold no part of the address."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, socket.gaierror):
        return "its name is not known from here"
    if isinstance(cause, TimeoutError):
        return f"no answer in {TIMEOUT_S:g} s"
    strerror = cause.strerror if isinstance(cause, OSError) else None
    return strerror or type(cause).__name__
