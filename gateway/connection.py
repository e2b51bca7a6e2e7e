"""The client's side of the wire: uvicorn's HTTP/1.1 protocol with limits of its own, and a short way for inference.

uvicorn parses, frames, keeps alive and pipelines. A request of the path becomes a `Turn` instead of an ASGI cycle: its
answer is written to the transport from the callback in which it came in from the backend, and the client's leaving is
a call, not a message that a task must wait for. Everything else goes the ASGI way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.answers import openai_error
from gateway.errors import HEADERS_TOO_LARGE, INVALID_REQUEST, REQUEST_TIMEOUT, Refusal
from gateway.exchange import Endpoint
from gateway.turn import HIGH_WATER, Turn

LINGER_S = 2.0  # how long an unread request body is thrown away, so that its sender sees the refusal and no reset
PIPELINED = 8  # requests that may wait behind the one that is answered before no more is read
PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """What a request head may be: its bytes in all, and the seconds until it must be complete."""

    bytes: int = 64 * 1024
    seconds: float = 10.0
    connections: int = 10_000


Infer = Callable[[Turn], Coroutine[Any, Any, None]]


class Connection(HttpToolsProtocol):
    """One client connection. A POST to one of `endpoints` is given to `infer`, the rest to the ASGI application."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HeadLimits,
        endpoints: Mapping[bytes, Endpoint],
        infer: Infer,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._endpoints = endpoints
        self._infer = infer
        self._turn: Turn | None = None  # the one that is being answered
        self._head_bytes = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._lingering = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        if len(self.connections) > self._limits.connections:
            transport.abort()
            return
        self._head_timer = self.loop.call_later(self._limits.seconds, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        turn, self._turn = self._turn, None
        if isinstance(self.cycle, Turn):
            self.cycle = None  # type: ignore[assignment]
        super().connection_lost(exc)
        if turn is not None:
            turn.gone = True
            turn.wake()
            if turn.on_gone is not None:
                turn.on_gone()

    def data_received(self, data: bytes) -> None:
        if self._lingering or self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.bytes:
                self._refuse(HEADERS_TOO_LARGE, f"The request head exceeds {self._limits.bytes} bytes.")
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(self._limits.seconds, self._head_timed_out)

    def linger(self) -> None:
        """Throw away what the client still sends, for a while, and only then close."""
        self._lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    # -- uvicorn's hooks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._stop_head_timer()
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
        if size > self._limits.bytes:
            self._refuse(HEADERS_TOO_LARGE, f"The request head exceeds {self._limits.bytes} bytes.")
            return
        path, _, query = self.url.partition(b"?")
        endpoint = self._endpoints.get(path) if self.parser.get_method() == b"POST" else None
        if endpoint is None:
            self._go_asgi()
            return
        earlier, self.cycle = self.cycle, Turn(self, endpoint, query, expects_continue=self.expect_100_continue)  # type: ignore[assignment]
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(self.cycle, None)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, None))  # type: ignore[arg-type]

    def _go_asgi(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if not isinstance(cycle, Turn):
            super()._start_asgi_task(cycle, app)
            return
        self._turn = cycle
        if not self.flow.write_paused:  # who takes no answers gets no more: they would pile up here
            cycle.task = self.loop.create_task(self._infer(cycle))

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, Turn):
            if not self.cycle.response_complete:
                self.cycle.took(body)
        elif not self._lingering:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, Turn):
            self.cycle.more_body = False
            self.cycle.wake()
        elif not self._lingering:
            super().on_message_complete()
        if len(self.pipeline) < PIPELINED:
            # It was paused for a large body or a pipelined request; only who reads sees the client leave.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._turn = None
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._turn is not None and self._turn.source is not None:
            self._turn.source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._turn is not None and self._turn.task is None:
            self._start_asgi_task(self._turn, None)
        elif self._turn is not None and self._turn.source is not None:
            self._turn.source.resume()

    def send_400_response(self, msg: str) -> None:
        self._refuse(INVALID_REQUEST, "The request is not valid HTTP/1.1.")

    def _refuse(self, refusal: Refusal, message: str) -> None:
        if self.transport.is_closing() or self._lingering:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._lingering = True  # an answer to an earlier request is under way: the connection ends with it
            self.cycle.keep_alive = False
        else:
            body = openai_error(refusal.type, refusal.code, message)
            head = (
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head % (refusal.status, PHRASES[refusal.status], len(body)) + body)
            self.linger()

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(REQUEST_TIMEOUT, f"The request head was not complete after {self._limits.seconds:g} s.")
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
