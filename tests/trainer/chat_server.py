"""A small real OpenAI-compatible server that fails as real ones do: busy, broken, slow, gone."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny/served"


def answer_to(messages: list[dict[str, Any]]) -> str:
    """What the model says: a function of the whole conversation, so a lost or doubled turn shows."""
    text = json.dumps([[m["role"], m["content"]] for m in messages])
    return "answer " + hashlib.sha256(text.encode()).hexdigest()[:8]


class ChatServer(ThreadingHTTPServer):
    """`troubles`, methods of Handler: which befalls a request, the first time, goes by its hash."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.troubles = ["ok"]
        self.delay_s = 0.0
        self.key: str | None = None
        self.served = [MODEL]
        self.lists_models = True
        self.lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.busy = self.busiest = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was killed is no news


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: Any, **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self) -> bool:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {"error": "no"})
            return False
        return True

    def do_GET(self) -> None:
        if not self.allowed():
            return
        if self.server.lists_models:
            self.reply(200, {"data": [{"id": name} for name in self.server.served]})
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.allowed():
            return
        body = json.loads(raw)
        digest = hashlib.sha256(raw).hexdigest()
        with self.server.lock:
            self.server.seen[digest] += 1
            first = self.server.seen[digest] == 1
            self.server.bodies.append(body)
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        try:
            time.sleep(self.server.delay_s)
            troubles = self.server.troubles
            getattr(self, troubles[int(digest[:8], 16) % len(troubles)] if first else "ok")(body)
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def ok(self, body: dict[str, Any]) -> None:
        asked = body["messages"][-1]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": answer_to(body["messages"])}
        finish = "stop"
        if "THINK" in asked:
            message["reasoning_content" if "OLD" in asked else "reasoning"] = "let me see"
        if "CALL" in asked:
            function = {"name": "add", "arguments": '{"a": 1}'}
            message |= {
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            }
            finish = "tool_calls"
        if "LONG" in asked:
            finish = "length"
        if "LOOP" in asked:
            message["content"], finish = "again and " * 200, "length"
        if "EMPTY" in asked:
            message["content"] = " "
        if "FILTER" in asked:
            finish = "content_filter"
        if "TOO MUCH" in asked:
            self.reply(400, {"error": {"message": "context\nlength exceeded"}})
            return
        choice = {"index": 0, "message": message, "finish_reason": finish}
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    def busy_now(self, body: dict[str, Any]) -> None:
        self.reply(429, {"error": "slow down"}, Retry_After="0.05")

    def broken(self, body: dict[str, Any]) -> None:
        self.reply(503, "<html>bad gateway</html>")

    def hangs_up(self, body: dict[str, Any]) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def cut_answer(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5000")
        self.end_headers()
        self.wfile.write(b'{"choices": [')
        self.hangs_up(body)

    def no_json(self, body: dict[str, Any]) -> None:
        self.reply(200, "it works!")

    def sleeps(self, body: dict[str, Any]) -> None:
        time.sleep(6)
        self.ok(body)


@contextmanager
def chat_server(**settings: Any) -> Iterator[ChatServer]:
    server = ChatServer()
    for name, value in settings.items():
        setattr(server, name, value)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
