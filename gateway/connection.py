"""The client's side of the wire: uvicorn's HTTP/1.1 protocol with limits of its own, and a direct way for answers.

uvicorn parses and frames requests. An answer of the path does not go through ASGI's `send`: it is written to the
transport from the callback in which it came in from the backend, and the client's leaving is a call, not a message
that a task must wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.answers import openai_error
from gateway.errors import HEADERS_TOO_LARGE, INVALID_REQUEST, REQUEST_TIMEOUT, Refusal

LINGER_S = 2.0  # how long an unread request body is thrown away, so that its sender sees the refusal and no reset
HIGH_WATER = 64 * 1024
PIPELINED = 64  # requests that may wait for the answer to an earlier one; each costs memory before it is looked at
PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """What a request head may be: its bytes in all, and the seconds until it must be complete."""

    bytes: int = 64 * 1024
    seconds: float = 10.0
    connections: int = 10_000


class Source(Protocol):
    """Where an answer comes from; it must not come faster than the client takes it."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Downlink:
    """The direct way of one answer to its client, and its framing: `answer` whole, or `begin`, `write`..., `end`.

    Heads are given without framing headers. A HEAD request never comes here. When the client leaves, `gone` is set,
    `on_gone` is called, and nothing is written any more. `source` is paused while the client is slow.
    """

    __slots__ = ("_chunked", "_connection", "_cycle", "_transport", "gone", "on_gone", "source")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport
        self._chunked = False
        self.on_gone: Callable[[], object] | None = None
        self.source: Source | None = None
        self.gone = connection.transport.is_closing()

    @property
    def unread(self) -> bool:
        """Whether more of the request's body is to come."""
        return self._cycle.more_body

    @property
    def broken(self) -> bool:
        """Whether the rest of the request's body will never come: what came of it is not HTTP."""
        return self._cycle.more_body and self._connection.lingering

    @property
    def date(self) -> list[tuple[bytes, bytes]]:
        """The Date header, kept by uvicorn."""
        return self._cycle.default_headers

    def feed_from(self, source: Source) -> None:
        """The rest of the answer comes from `source`."""
        self.source = source
        if self._connection.flow.write_paused:
            source.pause()

    def answer(self, head: bytes, body: bytes) -> None:
        """A whole answer, in one write."""
        cycle = self._cycle
        close = b"" if cycle.keep_alive and not cycle.more_body else b"connection: close\r\n"
        if not self.gone:
            self._transport.write(b"%bcontent-length: %d\r\n%b\r\n%b" % (head, len(body), close, body))
        self._finish()

    def begin(self, head: bytes, length: int | None, first: bytes) -> None:
        """The head of an answer whose body is `length` bytes long, or as long as it will be, and its first bytes."""
        cycle = self._cycle
        cycle.response_started = True
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif cycle.scope["http_version"] == "1.0":
            framing, cycle.keep_alive = b"", False
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        if not cycle.keep_alive or cycle.more_body:
            framing += b"connection: close\r\n"
        if self._chunked and first:
            first = b"%x\r\n%b\r\n" % (len(first), first)
        if not self.gone:
            self._transport.write(b"%b%b\r\n%b" % (head, framing, first))

    def write(self, data: bytes) -> None:
        if data and not self.gone:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self, data: bytes = b"") -> None:
        """The last bytes: the answer is whole, as far as HTTP goes."""
        self.write(data)
        if self._chunked and not self.gone:
            self._transport.write(b"0\r\n\r\n")
        self._finish()

    def cut(self) -> None:
        """The answer cannot be completed, and the client must see that."""
        self.on_gone = self.source = None
        self._cycle.response_started = self._cycle.response_complete = True
        self._transport.abort()

    def _finish(self) -> None:
        cycle = self._cycle
        self.on_gone = self.source = None
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if self.gone:
            return
        if not cycle.keep_alive and not cycle.more_body:
            self._transport.close()
        cycle.on_response()


class Connection(HttpToolsProtocol):
    """One client connection. `scope["headrace.downlink"]` gives the application the direct way."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HeadLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._downlink: Downlink | None = None
        self.lingering = False  # whatever the client still sends is thrown away
        self._idle_bytes = 0  # since a request began or its body grew: of a head, of trailers, of chunk extensions
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        if len(self.connections) > self._limits.connections:
            transport.abort()
            return
        self._head_timer = self.loop.call_later(self._limits.seconds, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)
        downlink, self._downlink = self._downlink, None
        if downlink is not None:
            downlink.gone = True
            if downlink.on_gone is not None:
                downlink.on_gone()

    def data_received(self, data: bytes) -> None:
        if self.lingering or self.transport.is_closing():
            return
        self._idle_bytes += len(data)
        self._unset_keepalive_if_required()
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
        self.lingering = True
        self._stop_head_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    # -- uvicorn's hooks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._idle_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if self.lingering:
            return
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.bytes:
            self._refuse(HEADERS_TOO_LARGE, f"The request head exceeds {self._limits.bytes} bytes.")
            return
        if len(self.pipeline) >= PIPELINED:
            self._refuse(INVALID_REQUEST, "Too many requests wait on this connection.")
            return
        if self.expect_100_continue and self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1: such a client takes the interim answer for the answer
        super().on_headers_complete()
        self.headers = []  # trailers go there: nobody reads them, and they must not pass for headers

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        if not self.lingering:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        if not self.lingering and not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        downlink, self._downlink = self._downlink, None
        super().on_response_complete()
        if downlink is not None and downlink.unread and not self.transport.is_closing():
            self.linger()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._downlink = Downlink(self, cycle)
        cycle.scope["headrace.downlink"] = self._downlink  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._downlink is not None and self._downlink.source is not None:
            self._downlink.source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._downlink is not None and self._downlink.source is not None:
            self._downlink.source.resume()

    def _refuse(self, refusal: Refusal, message: str) -> None:
        if self.transport.is_closing() or self.lingering:
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # An answer is under way, to an earlier request or, where a body broke its framing, to this very one: it
            # ends, and the connection with it.
            self.lingering = True
            cycle.keep_alive = False
            cycle.message_event.set()
        else:
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

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
