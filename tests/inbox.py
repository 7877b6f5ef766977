"""A web server that takes messages, as whoever is to be told of a run has one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Inbox:
    """`got`: what was posted and taken, with `path` and `headers`; the first `refuse` posts fail with 500."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.posts = self.refuse = 0
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inbox.posts += 1
                taken = inbox.posts > inbox.refuse and "gone" not in self.path
                if taken:
                    inbox.got.append({**data, "path": self.path, "headers": dict(self.headers)})
                self.send_response(200 if taken else 404 if "gone" in self.path else 500)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    @property
    def titles(self) -> list[str]:
        return [each["title"] for each in self.got]


@contextlib.contextmanager
def open_inbox() -> Iterator[Inbox]:
    made = Inbox()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
