"""One request on a client connection and its answer, framing included: the short way between a socket and the path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from gateway.exchange import Endpoint, Header

HIGH_WATER = 64 * 1024  # bytes of an answer that wait for a slow client, and of a body that wait to be read


class Source(Protocol):
    """Where an answer comes from; it must not come faster than the client takes it."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Carrier(Protocol):
    """The connection that a turn is on."""

    parser: Any
    flow: Any
    server_state: Any
    transport: asyncio.Transport
    headers: list[Header]
    owner: str
    on_closed: Callable[[], None] | None

    def on_response_complete(self) -> None: ...


class Turn:
    """One request on a client connection and the answer to it: what uvicorn calls a cycle.

    The body is read by `piece`; `broken` says that its rest will never come, because what came is not HTTP. The answer
    is given by `answer`, or by `begin`, `writer` and `end`; heads come without framing headers. When the client leaves,
    `gone` is set, `on_gone` is called, and nothing is written any more. `source` is paused while the client is slow.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_pieces",
        "_reader",
        "_size",
        "_transport",
        "broken",
        "endpoint",
        "expects_continue",
        "gone",
        "headers",
        "http10",
        "keep_alive",
        "more_body",
        "on_gone",
        "query",
        "response_complete",
        "source",
        "task",
    )

    def __init__(self, connection: Carrier, endpoint: Endpoint, query: bytes, *, expects_continue: bool) -> None:
        self.endpoint = endpoint
        self.query = query
        self.headers: list[Header] = connection.headers
        self.http10 = connection.parser.get_http_version() == "1.0"
        self.keep_alive: bool = not self.http10 and connection.parser.should_keep_alive()
        # RFC 9110, 10.1.1: a client of HTTP/1.0 takes an interim answer for the answer
        self.expects_continue = expects_continue and not self.http10
        self.more_body = True
        self.response_complete = False
        self.gone = False
        self.broken = False
        self.on_gone: Callable[[], object] | None = None
        self.source: Source | None = None
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._transport = connection.transport
        self._pieces: list[bytes] = []
        self._size = 0  # bytes in them
        self._reader: asyncio.Future[None] | None = None
        self._chunked = False

    @property
    def date(self) -> list[Header]:
        """The Date header, kept by uvicorn."""
        headers: list[Header] = self._connection.server_state.default_headers
        return headers

    @property
    def door(self) -> Carrier:
        """The connection, as its tenant's."""
        return self._connection

    # -- the request's body -------------------------------------------------------------------------------------

    def whole(self) -> bytes | None:
        """The body, if all of it is here."""
        if self.more_body:
            return None
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    async def piece(self) -> bytes:
        """More of the body; empty at its end, and when no more will come, which `gone` or `broken` tells."""
        if self.expects_continue and not self._pieces:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.expects_continue = False
        while not (self._pieces or self.gone or self.broken) and self.more_body:
            self._connection.flow.resume_reading()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return data

    def took(self, body: bytes) -> None:
        """A piece came in."""
        self._pieces.append(body)
        self._size += len(body)
        if self._reader is not None:
            self.wake()
        elif self._size > HIGH_WATER and len(self._pieces) > 1:
            self._connection.flow.pause_reading()

    def wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- its answer ---------------------------------------------------------------------------------------------

    def feed_from(self, source: Source) -> None:
        """The rest of the answer comes from `source`."""
        self.source = source
        if self._connection.flow.write_paused:
            source.pause()

    def answer(self, head: bytes, body: bytes, *, sized: bool = True) -> None:
        """A whole answer, in one write; not `sized` where the status allows no body."""
        length = b"content-length: %d\r\n" % len(body) if sized else b""
        close = b"" if self.keep_alive and not self.more_body else b"connection: close\r\n"
        if not self.gone:
            self._transport.write(b"%b%b%b\r\n%b" % (head, length, close, body))
        self._finish()

    def begin(self, head: bytes, length: int | None, first: bytes) -> None:
        """The head of an answer whose body is `length` bytes long, or as long as it will be, and its first bytes."""
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.http10:
            framing = b""
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        if not self.keep_alive or self.more_body:
            framing += b"connection: close\r\n"
        if self._chunked and first:
            first = b"%x\r\n%b\r\n" % (len(first), first)
        if not self.gone:
            self._transport.write(b"%b%b\r\n%b" % (head, framing, first))

    def writer(self) -> Callable[[bytes], None]:
        """What takes the pieces of the body that `begin` announced; none may be empty, which would end it."""
        send = self._transport.write

        def write(data: bytes) -> None:
            if not self.gone:
                send(data)

        def write_chunk(data: bytes) -> None:
            if not self.gone:
                send(b"%x\r\n%b\r\n" % (len(data), data))

        return write_chunk if self._chunked else write

    def end(self, data: bytes = b"") -> None:
        """The last bytes: the answer is whole, as far as HTTP goes."""
        if self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        if data and not self.gone:
            self._transport.write(data)
        self._finish()

    def cut(self) -> None:
        """The answer cannot be completed, and the client must see that."""
        self.on_gone = self.source = None
        self.response_complete = True
        self._transport.abort()

    def _finish(self) -> None:
        self.on_gone = self.source = None
        self.response_complete = True
        self._pieces.clear()  # the connection keeps its last turn
        if self.gone:
            return
        if not self.keep_alive and not self.more_body:
            self._transport.close()
        self._connection.on_response_complete()
