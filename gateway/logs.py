"""Log lines on their way out: gathered while requests are answered, written together a moment later."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
from collections.abc import Iterator
from typing import Literal

import msgspec

from gateway.metrics import Counter, Family

DELAY_S = 0.05
PIECE = select.PIPE_BUF  # a pipe that is writable takes so much without blocking
MAX_PENDING = 10_000  # lines kept for a reader that does not keep up; older than that they are worth less than memory


class LogWriter:
    """Writes lines to a file descriptor, in order. Lines that nobody takes are dropped and counted. The descriptor may
    block, and is left as it is, since others have it too: nothing is written while it is not ready for it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        self._pending: list[bytes] = []
        self._scheduled = False
        self.dropped = 0

    def write(self, line: bytes) -> None:
        if len(self._pending) >= MAX_PENDING:
            self.dropped += 1
            return
        self._pending.append(line)
        self._schedule()

    def _schedule(self) -> None:
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
        if self._pending and self._ready.poll(0):
            data = b"".join(self._pending)
            self._pending = self._rest(data).splitlines(keepends=True)
        if self._pending:
            self._schedule()

    def _rest(self, data: bytes) -> bytes:
        """Writes what is taken. Returns what is not."""
        written = 0
        try:
            while written < len(data) and self._ready.poll(0):
                whole = data.rfind(b"\n", written, written + PIECE) + 1  # others may write between two pieces
                written += os.write(self._descriptor, data[written : whole or written + PIECE])
        except BlockingIOError:
            pass
        except OSError:
            self.dropped += data.count(b"\n", written)
            return b""
        return data[written:]


class LogLine(msgspec.Struct):
    """What the gateway says that is no request's. `traceback` of a bug, if it is one."""

    time: float
    level: str
    message: str
    event: Literal["log"]
    traceback: str = ""


class JsonFormatter(logging.Formatter):
    """Writes log records as `LogLine`s."""

    def format(self, record: logging.LogRecord) -> str:
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        line = LogLine(round(record.created, 3), record.levelname.lower(), record.getMessage(), "log", traceback)
        return json.dumps(msgspec.to_builtins(line))


def log_to_stderr(form: str) -> None:
    """Where this process says what is no request's, `json` or as text; of other libraries only errors."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    logging.getLogger("headrace").setLevel(logging.INFO)


def as_text(line: bytes) -> bytes:
    """A JSON line for people who read along: `warning client_disconnect 499 /v1/responses tenant=acme ttft_ms=10.5`.
    What is empty, or not there because the line tells of something else than a request, is left out."""
    fields = json.loads(line)
    first = [str(fields.pop(name)) for name in ("level", "outcome", "status", "path") if name in fields]
    rest = [f"{name}={value}" for name, value in fields.items() if value not in ("", None)]
    return " ".join([*first, *rest]).encode() + b"\n"
