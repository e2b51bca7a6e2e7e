"""An HTTP/1.1 server on a bare asyncio protocol and httptools, made to be told to misbehave.

A handler is a plain function that is called with a whole request and a Reply; it may answer at once or keep the Reply
and answer bit by bit. What a Reply sends are pieces (the head, bodies, the end), and a tap may take each of them
instead of the wire: that is how faults are made, see `loadtests.faults`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum, auto
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote_to_bytes

import httptools

Header = tuple[bytes, bytes]
JSON = b"application/json"
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
# As long as it takes the peer to read what came before a reset: a reset throws away what was not read.
RESET_AFTER_S = 0.02


class Piece(Enum):
    HEAD = auto()
    BODY = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose body has come. Header names are in lower case; of a header sent twice the last counts."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes


Tap = Callable[["Reply", Piece, bytes], None]
Handler = Callable[[Request, "Reply"], None]


class Reply:
    """The answer to one request. `on_gone` is called if the client leaves before it has ended."""

    __slots__ = ("bodies", "chunked", "connection", "ended", "error", "head_only", "keep_alive", "on_gone", "tap")

    def __init__(self, connection: Connection, *, keep_alive: bool, head_only: bool) -> None:
        self.connection = connection
        self.keep_alive = keep_alive
        self.head_only = head_only
        self.chunked = False
        self.ended = False
        self.bodies = 0  # body pieces that went out
        self.tap: Tap | None = None
        self.on_gone: Callable[[], None] | None = None
        self.error: Callable[[str, str, int], bytes] | None = None  # words an error in mid-stream, in its dialect

    def begin(self, status: int = 200, kind: bytes = b"text/event-stream; charset=utf-8") -> None:
        """The head of an answer of unknown length."""
        self.chunked = True
        self.pass_on(Piece.HEAD, head(status, kind, (), None, self.keep_alive))

    def send(self, data: bytes) -> None:
        """One event, or a part of the body."""
        if data:
            self.pass_on(Piece.BODY, data)

    def end(self) -> None:
        self.pass_on(Piece.END, b"")

    def whole(self, status: int, body: bytes, kind: bytes = JSON, headers: Sequence[Header] = ()) -> None:
        """A complete answer of known length."""
        first = head(status, kind, headers, len(body), self.keep_alive)
        if self.tap is None:
            self.raw(first if self.head_only else first + body)
            self.finish()
            return
        self.pass_on(Piece.HEAD, first)
        self.pass_on(Piece.BODY, body)
        self.pass_on(Piece.END, b"")

    def pass_on(self, piece: Piece, data: bytes) -> None:
        if self.tap is None:
            self.put(piece, data)
        else:
            self.tap(self, piece, data)

    def put(self, piece: Piece, data: bytes) -> None:
        """The piece as it goes onto the wire."""
        if piece is Piece.BODY:
            self.bodies += 1
            if self.chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
        elif piece is Piece.END and self.chunked:
            data = b"0\r\n\r\n"
        if piece is Piece.HEAD or not self.head_only:
            self.raw(data)
        if piece is Piece.END:
            self.finish()

    def raw(self, data: bytes) -> None:
        """Bytes as they are. After the client has left they go nowhere."""
        if data:
            self.connection.write(data)

    def finish(self) -> None:
        """No more pieces come: the connection is free for the next request."""
        if not self.ended:
            self.ended = True
            self.connection.free(self.keep_alive)

    def close(self) -> None:
        """End the connection in order (FIN), whatever is still owed."""
        self.connection.close()

    def reset(self, *, after_s: float = RESET_AFTER_S) -> None:
        """End the connection with a reset (RST), `after_s` from now so that what was sent before can be read."""
        self.tap = swallow
        self.later(after_s, self.connection.reset)

    def abandon(self) -> None:
        """Send nothing more and let go of what was being made for it; the connection stays as it is."""
        self.tap = swallow
        if self.on_gone is not None:
            self.on_gone()

    def later(self, after_s: float, act: Callable[[], None]) -> None:
        """Act in `after_s` seconds, unless the connection has ended by then."""
        asyncio.get_running_loop().call_later(after_s, self.connection.unless_lost, act)


def swallow(reply: Reply, piece: Piece, data: bytes) -> None:
    """The tap that lets nothing through any more."""


def head(status: int, kind: bytes, headers: Sequence[Header], length: int | None, keep_alive: bool) -> bytes:
    """A response head as uvicorn writes it; chunked where the length is None."""
    framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    date = formatdate(usegmt=True).encode()
    lines = [b"HTTP/1.1 %d %b" % (status, REASONS.get(status, b"")), b"date: %b" % date, b"server: uvicorn"]
    lines += [b"content-type: %b" % kind, framing, *(b"%b: %b" % header for header in headers)]
    if not keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection of a client. Requests are answered in the order in which they came."""

    transport: asyncio.Transport

    def __init__(self, handler: Handler, keep_alive_s: float, open_connections: set[Connection]) -> None:
        self.handler = handler
        self.keep_alive_s = keep_alive_s
        self.siblings = open_connections
        self.parser = httptools.HttpRequestParser(self)
        self.waiting: deque[tuple[Request, bool]] = deque()
        self.reply: Reply | None = None
        self.lost = False
        self.idle: asyncio.TimerHandle | None = None
        self.on_message_begin()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.siblings.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.siblings.discard(self)
        self.still()
        self.waiting.clear()
        if self.reply is not None and self.reply.on_gone is not None:
            self.reply.on_gone()

    def data_received(self, data: bytes) -> None:
        self.still()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of ours and not of the request
        except httptools.HttpParserError:
            bad = b"Invalid HTTP request received."
            self.write(head(400, b"text/plain; charset=utf-8", (), len(bad), False) + bad)
            self.close()

    # What the parser calls, in this order.

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        path = unquote_to_bytes(self.url.partition(b"?")[0]).decode("utf-8", "replace")
        request = Request(self.parser.get_method().decode(), path, self.headers, b"".join(self.parts))
        self.waiting.append((request, self.parser.should_keep_alive()))
        self.serve()

    def serve(self) -> None:
        """Take up the next request if none is being answered."""
        if self.reply is None and self.waiting and not self.lost:
            request, keep_alive = self.waiting.popleft()
            self.reply = Reply(self, keep_alive=keep_alive, head_only=request.method == "HEAD")
            self.handler(request, self.reply)

    def free(self, keep_alive: bool) -> None:
        """The answer has ended."""
        self.reply = None
        if not keep_alive:
            self.close()
        elif self.waiting:
            self.serve()
        elif not self.lost:
            self.idle = asyncio.get_running_loop().call_later(self.keep_alive_s, self.close)

    def still(self) -> None:
        if self.idle is not None:
            self.idle.cancel()
            self.idle = None

    def unless_lost(self, act: Callable[[], None]) -> None:
        if not self.lost:
            act()

    def write(self, data: bytes) -> None:
        if not self.lost:
            self.transport.write(data)

    def close(self) -> None:
        """Send what is owed, then FIN; nothing more is written."""
        if not self.lost:
            self.lost = True
            self.transport.close()

    def reset(self) -> None:
        """Throw the connection away: linger zero makes the kernel send RST instead of FIN."""
        sock = cast(socket.socket, self.transport.get_extra_info("socket"))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def behind(self) -> int:
        """Bytes that the client has not taken yet, beyond what the kernel holds."""
        return self.transport.get_write_buffer_size()
