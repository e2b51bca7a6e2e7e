"""A backend that is busy once: it says when to come again, and then it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from tests.faults.fakes import completion

BUSY = b'{"error": {"message": "busy", "type": "TooManyRequests", "param": null, "code": 429}}'


class Handler(BaseHTTPRequestHandler):
    """Refuses the first request of its server, with `Retry-After: 1`."""

    asked: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.asked.append(self.path)
        first = len(self.asked) == 1
        body = BUSY if first else completion("now")
        self.send_response(429 if first else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if first:
            self.send_header("retry-after", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Silent."""


@contextmanager
def busy_once() -> Iterator[str]:
    """Its URL."""
    handler = type("Handler", (Handler,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
