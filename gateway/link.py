"""One connection to a backend: bytes out and in, flow control both ways, and how long it may rest between requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

IDLE_LIMIT_S = 4.0  # uvicorn, and with it vLLM and SGLang, closes idle connections after 5 s
SLICE = 64 * 1024  # a larger request body is written in slices, each only when the last has drained
HINT = re.compile(rb"(timeout|max)\s*=\s*(\d{1,6})")  # of a Keep-Alive header: llama.cpp drops what it announced there


class Link(asyncio.Protocol):
    """One connection to a backend. It carries one reply at a time, which gets what comes in by `on_data`, and knows by
    `on_lost` that no more will; none while it is idle."""

    def __init__(self) -> None:
        self.on_data: Callable[[bytes], None] = self._unasked
        self.on_lost: Callable[[], None] | None = None
        self.closed = False
        self.uses = 0
        self.max_uses = 1_000_000
        self.idle_limit_s = IDLE_LIMIT_S
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._reading = True
        self._writable: asyncio.Future[None] | None = None
        self._sent = True

    def __repr__(self) -> str:
        state = "closed" if self.closed else "idle" if self.on_lost is None else "busy"
        return f"<Link {state}, used {self.uses} times>"

    def send(self, head: bytes, body: list[bytes | memoryview]) -> None:
        """Write a request that fits into the socket's buffer."""
        assert self._transport is not None
        self.uses += 1
        self._transport.write(b"".join([head, *body]))

    async def send_large(self, head: bytes, body: list[bytes | memoryview], awaited: Callable[[], bool]) -> None:
        """Write a request only as fast as the backend takes it, asking before each slice whether an answer is still
        `awaited`: a backend may refuse before it has read all."""
        assert self._transport is not None
        self.uses += 1
        self._sent = False
        self._transport.write(head)
        for piece in body:
            view = memoryview(piece)
            for start in range(0, len(piece), SLICE):
                if self._writable is not None:
                    await self._writable
                if self.closed or not awaited():
                    return
                self._transport.write(view[start : start + SLICE])
        self._sent = True

    def go_on(self) -> None:
        """Whoever waits to send more looks again: there is room, or the answer has come, or the connection is gone."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def rest(self, now: float, keep_alive_hint: bytes) -> bool:
        """The reply is read to its end: whether the link may serve another one. If not, it is closed here."""
        for name, value in HINT.findall(keep_alive_hint) if keep_alive_hint else ():
            if name == b"max":
                self.max_uses = min(self.max_uses, self.uses + int(value))
            else:  # leave a second for what is on the way
                self.idle_limit_s = min(self.idle_limit_s, max(0.0, int(value) - 1.0))
        if self.closed or not self._sent or self.uses >= self.max_uses:
            self.abort()
            return False
        self.on_data, self.on_lost = self._unasked, None
        self.resume()
        self.idle_since = now
        return True

    def abort(self) -> None:
        """Close at once: whatever the backend still does for this request is not wanted."""
        if self._transport is not None and not self.closed:
            self._transport.abort()

    def pause(self) -> None:
        if self._reading and self._transport is not None and not self.closed:
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._reading and self._transport is not None and not self.closed:
            self._reading = True
            self._transport.resume_reading()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.on_data(data)

    def _unasked(self, data: bytes) -> None:
        """Whatever it is, it must not become the next answer."""
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.resume_writing()
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self.go_on()
        self._writable = None
