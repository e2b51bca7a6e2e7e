"""Log lines on their way out: gathered while requests are answered, written together a moment later."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

from gateway.metrics import Counter, Family

DELAY_S = 0.05
MAX_PENDING = 10_000  # lines kept for a reader that does not keep up; older than that they are worth less than memory


class LogWriter:
    """Writes lines to a file descriptor, in order. Lines that nobody takes are dropped and counted."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending: list[bytes] = []
        self._scheduled = False
        self.dropped = 0

    def write(self, line: bytes) -> None:
        if len(self._pending) >= MAX_PENDING:
            self.dropped += 1
            return
        self._pending.append(line)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(DELAY_S, self.flush)

    def metrics(self) -> Iterator[Family]:
        """What was lost."""
        dropped = Counter("headrace_log_lines_dropped_total", "Log lines that nobody took in time.")
        dropped.values[()] = self.dropped
        yield dropped

    def flush(self) -> None:
        """Everything that is pending. A descriptor that takes no more keeps the rest for the next time."""
        self._scheduled = False
        data = b"".join(self._pending)
        self._pending.clear()
        try:
            written = os.write(self._descriptor, data) if data else 0
        except BlockingIOError:
            written = 0
        except OSError:
            self.dropped += data.count(b"\n")
            return
        if written < len(data):
            self._pending.append(data[written:])


def as_text(line: bytes) -> bytes:
    """A JSON line for people who read along: `warning client_disconnect 499 /v1/responses tenant=acme ttft_ms=10.5`.
    What is empty is left out."""
    fields = json.loads(line)
    first = [str(fields.pop(name)) for name in ("level", "outcome", "status", "path")]
    rest = [f"{name}={value}" for name, value in fields.items() if value not in ("", None)]
    return " ".join([*first, *rest]).encode() + b"\n"
