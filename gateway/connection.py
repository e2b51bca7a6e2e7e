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
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.answers import openai_error
from gateway.errors import HEADERS_TOO_LARGE, INVALID_REQUEST, REQUEST_TIMEOUT, Refusal
from gateway.exchange import Endpoint
from gateway.reply import CLIENT_STALL_S
from gateway.turn import HIGH_WATER, Turn

# An unread request body is thrown away, so that its sender sees the refusal and no reset: while it comes, and this long
LINGER_S = 2.0
MOST_LINGER_S = 30.0  # nginx's lingering_time
PIPELINED = 8  # requests that may wait behind the one that is answered before no more is read
MOST_PIPELINED = 64  # what was read may hold 14,000 more, each of which costs memory before it is looked at
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
        self.owner = ""  # the tenant, where its connections are counted
        self.on_closed: Callable[[], None] | None = None
        self._turn: Turn | None = None  # the one that is being answered
        self._idle_bytes = 0  # since a request began or its body grew: of a head, of trailers, of chunk extensions
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._lingering = False
        self._still_sending = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        if len(self.connections) > self._limits.connections:
            transport.abort()
            return
        self._head_timer = self.loop.call_later(self._limits.seconds, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_drain_timer()
        if self.on_closed is not None:
            self.on_closed()
        turn, self._turn = self._turn, None
        if isinstance(self.cycle, Turn):
            self.cycle = None  # type: ignore[assignment]  # uvicorn sets it so at its start, untold by its type
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn forgets it after a reset, and the timer keeps the connection
        if turn is not None:
            turn.gone = True
            turn.wake()
            if turn.on_gone is not None:
                turn.on_gone()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._still_sending = True
        if self._lingering or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._idle_bytes += len(data)
        self._parse(data)
        if self._idle_bytes > self._limits.bytes:
            self._refuse(HEADERS_TOO_LARGE, f"The request head exceeds {self._limits.bytes} bytes.")
        elif self._head_timer is None and (self._in_head or self.cycle is None or self.cycle.response_complete):
            self._head_timer = self.loop.call_later(self._limits.seconds, self._head_timed_out)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(INVALID_REQUEST, "The request is not valid HTTP/1.1.")

    def _decline(self, rest: bytes) -> None:
        """The client offers to go on in another protocol: curl and Java's client offer h2c, with any request. llhttp
        then takes the request's body for that protocol. So read the request again, this time without the offer."""
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self._parse(b"".join((*head, b"\r\n", rest)))

    def linger(self) -> None:
        """Throw away what the client still sends, for a while, and only then close."""
        self._lingering = True
        self._stop_head_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_on(self.loop.time() + MOST_LINGER_S)

    def _linger_on(self, until: float) -> None:
        self._still_sending = False
        self._head_timer = self.loop.call_later(LINGER_S, self._end_linger, until)

    def _end_linger(self, until: float) -> None:
        if self._still_sending and self.loop.time() < until:
            self._linger_on(until)
        else:
            self.transport.abort()

    # -- uvicorn's hooks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._idle_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._stop_head_timer()
        if self._lingering or (self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"):
            return
        size, foreign = len(self.url), b""
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                foreign = value
        if foreign:  # llhttp undoes the last coding only, and what is then taken for the body is something else
            self._refuse(INVALID_REQUEST, "The only transfer encoding that is understood is chunked.")
        elif size > self._limits.bytes:
            self._refuse(HEADERS_TOO_LARGE, f"The request head exceeds {self._limits.bytes} bytes.")
        elif len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(INVALID_REQUEST, "Too many requests wait on this connection.")
        else:
            self._start()
            self.headers = []  # trailers go there: nobody reads them, and they must not pass for headers

    def _start(self) -> None:
        path, _, query = self.url.partition(b"?")
        posted = self.parser.get_method() == b"POST"
        endpoint = self._endpoints.get(path) if posted else None
        if endpoint is None and posted:  # it may be written otherwise: with escapes, or as a whole URL
            url = httptools.parse_url(self.url)
            endpoint, query = self._endpoints.get(unquote_to_bytes(url.path or b"")), url.query or b""
        if endpoint is None:
            self._go_asgi()
            return
        earlier, turn = self.cycle, Turn(self, endpoint, query, expects_continue=self.expect_100_continue)
        self.cycle = turn  # type: ignore[assignment]  # it has of uvicorn's cycle what uvicorn asks for
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(self.cycle, None)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, None))  # type: ignore[arg-type]  # it needs no application

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
        self._idle_bytes = 0
        if self._lingering:
            return
        if isinstance(self.cycle, Turn):
            if not self.cycle.response_complete:
                self.cycle.took(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        if self._lingering or self.parser.should_upgrade():
            return
        if isinstance(self.cycle, Turn):
            self.cycle.more_body = False
            self.cycle.wake()
        else:
            super().on_message_complete()
        if len(self.pipeline) < PIPELINED:
            # It was paused for a large body or a pipelined request; only who reads sees the client leave.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        unread = not self.pipeline and self.cycle.more_body
        self._turn = None
        self._watch_drain()
        super().on_response_complete()
        if unread and not self.transport.is_closing():
            self.linger()

    def _watch_drain(self) -> None:
        """An answer is over here, but its client may never take the rest: closing would wait for that without end."""
        self._stop_drain_timer()
        if left := self.transport.get_write_buffer_size():
            self._drain_timer = self.loop.call_later(CLIENT_STALL_S, self._end_drain, left)

    def _end_drain(self, left: int) -> None:
        waits = self._turn is None or self._turn.task is None  # nothing was begun after it
        if waits and self.transport.get_write_buffer_size() >= left:
            self.transport.abort()
        else:
            self._watch_drain()

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

    def _refuse(self, refusal: Refusal, message: str) -> None:
        if self.transport.is_closing() or self._lingering:
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # An answer is under way, to an earlier request or, where a body broke its framing, to this very one: the
            # connection ends with it.
            self._lingering = True
            cycle.keep_alive = False
            if isinstance(cycle, Turn) and cycle.more_body:
                cycle.broken = True
                cycle.wake()
            return
        body = openai_error(refusal.type, refusal.code, message)
        head = (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-headrace-reason: %b\r\nconnection: close\r\n\r\n"
        ) % (refusal.status, PHRASES[refusal.status], len(body), refusal.reason.encode())
        self.transport.write(head + body)
        self.linger()

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(REQUEST_TIMEOUT, f"The request head was not complete after {self._limits.seconds:g} s.")
        else:
            self.transport.close()

    def _stop_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
