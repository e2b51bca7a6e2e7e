"""HTTP/1.1 as a client speaks it, without I/O: the bytes of a request head, and a reader of one response."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import httptools

from gateway.inflate import Damaged, Inflater, inflater

Header = tuple[bytes, bytes]

# Node allows 16 KiB, llhttp nothing, nginx 8 KiB per line; OpenAI documents 64 KiB for all of them together.
MAX_HEAD = 64 * 1024

# Never relayed in either direction (RFC 9110, 7.6.1); names that a Connection header nominates come on top.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)


class BadResponse(Exception):
    """The peer did not speak HTTP/1.1, or went past a limit. `body`: what had come of the body before that."""

    def __init__(self, message: str, body: bytes = b"") -> None:
        super().__init__(message)
        self.body = body


class Answer(NamedTuple):
    """A whole answer. Header names are in lower case; framing headers are not among them."""

    status: int
    headers: list[Header]
    body: bytes


def nominated(headers: Iterable[Header]) -> frozenset[bytes]:
    """The lower-case header names that `Connection` declares to be hop-by-hop."""
    names: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            names.update(token.strip().lower() for token in value.split(b","))
    return frozenset(names)


def request_head(method: bytes, target: bytes, host: bytes, headers: Iterable[Header], length: int) -> bytes:
    """The head of a request with a body of `length` bytes, blank line included."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, host)]
    lines += [b"%b: %b\r\n" % header for header in headers]
    lines.append(b"content-length: %d\r\n\r\n" % length)
    return b"".join(lines)


class ResponseReader:
    """Reads one response: `feed` takes bytes cut anywhere and returns the body bytes that they held.

    After each feed: `head_done` says that `status` and `headers` (names in lower case) stand; `complete` that the
    body ended as its framing promised. Interim (1xx) responses are skipped, trailers dropped. A compressed body, which
    nobody asked for, comes out plain, and its headers say so.
    """

    __slots__ = (
        "_fed",
        "_framed",
        "_head_only",
        "_inflater",
        "_keep_alive",
        "_parse",
        "_parser",
        "_pieces",
        "_silent",
        "complete",
        "head_done",
        "headers",
        "keep_alive_hint",
        "on_body",
        "status",
    )

    def __init__(self, *, head_only: bool = False) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.head_done = False
        self.complete = False
        self.keep_alive_hint = b""
        self._fed = 0
        self._framed = False
        self._silent = 0
        self._keep_alive = False
        self._head_only = head_only
        self._inflater: Inflater | None = None
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # a callback of the parser, for every piece of every stream
        self._parser = httptools.HttpResponseParser(self)
        self._parse = self._parser.feed_data

    def feed(self, data: bytes) -> bytes:
        """Raises BadResponse for what is not HTTP/1.1, for a head larger than MAX_HEAD, and for a damaged body."""
        try:
            self._parse(data)
        except httptools.HttpParserUpgrade:
            raise BadResponse("it switched protocols unasked") from None
        except httptools.HttpParserError as error:
            if not self.complete:
                raise BadResponse(f"not HTTP/1.1: {error}", self._rest()) from None
            self._framed = False  # what follows a complete answer only costs the connection
        pieces = self._pieces
        if not pieces:
            self._bound(len(data))
            return b"" if self._inflater is None else self._undone(b"")
        self._silent = 0
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body if self._inflater is None and not self._head_only else self._undone(body)

    def _rest(self) -> bytes:
        """What came before the damage."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body if self._inflater is None else self._undone(body)

    def _undone(self, body: bytes) -> bytes:
        if self._head_only:  # there is none: what came is not this response's
            self._framed = self._framed and not body
            return b""
        assert self._inflater is not None
        try:
            plain = self._inflater.feed(body)
            return plain + self._inflater.end() if self.complete else plain
        except Damaged as error:
            self.complete, self._framed = False, True  # the framing is right, but the body is less than was meant
            raise BadResponse(str(error)) from None

    def _bound(self, silent: int) -> None:
        """No more than MAX_HEAD bytes for a head, and none that never become body after it (trailers, chunk sizes)."""
        self._fed += silent
        self._silent = self._silent + silent if self.head_done else 0
        if self._silent > MAX_HEAD or (not self.head_done and self._fed > MAX_HEAD):
            raise BadResponse(f"its head or its trailers exceed {MAX_HEAD} bytes")

    def eof(self) -> bool:
        """The peer closed: whether that ends the response as promised."""
        if self.head_done and not self._framed and not self.complete:
            self.complete = True  # neither length nor chunks: the close is the end
            if self._inflater is not None:
                with suppress(BadResponse):
                    self._undone(b"")
        return self.complete

    @property
    def started(self) -> bool:
        """Whether any byte came."""
        return self._fed > 0 or self.head_done

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request now."""
        return self.complete and self._framed and self._keep_alive

    # -- called by httptools ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:  # nobody asked for a second message: nothing of it may get into the first
            raise BadResponse("it answered twice")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return
        name, value = name.lower(), value.rstrip()
        if name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._framed = True
        elif name == b"keep-alive":
            self.keep_alive_hint = value
        elif name == b"content-encoding":
            self._inflater = inflater(value)
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []
            self._framed = False
            self._inflater = None
            return
        self.head_done = True
        self._keep_alive = bool(self._parser.should_keep_alive())
        self._framed = self._framed or self.status in (204, 304)
        if self._inflater is not None:
            changed = (b"content-encoding", b"content-length", b"etag", b"content-md5")
            self.headers = [header for header in self.headers if header[0] not in changed]
        if self._head_only:
            self.complete = True

    def on_message_complete(self) -> None:
        if self.head_done:
            self.complete = True
