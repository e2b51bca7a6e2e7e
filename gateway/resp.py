"""One connection to Redis or Valkey: commands in, replies out, strictly in order (RESP, version 2).

Every command that is sent has its place in a row, and every reply takes the first place. Who gave up waiting leaves
the place behind, and the reply to it is dropped there: a reply never reaches anybody but who asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 8  # of arrays in arrays; CLUSTER SLOTS has four


class ReplyError(Exception):
    """The server refused a command: it was not carried out. The first word says why."""

    @property
    def word(self) -> str:
        return str(self).partition(" ")[0]


class LaneClosed(Exception):
    """The connection is gone; a command under way may have been carried out."""


class ProtocolError(Exception):
    """What came is not RESP."""


class Incomplete(Exception):
    """The reply has not come in whole."""


def packed(command: Sequence[str | bytes | int]) -> bytes:
    """A command as an array of bulk strings."""
    parts = [b"*%d\r\n" % len(command)]
    for word in command:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def read(data: bytes, start: int, depth: int = 0) -> tuple[Any, int]:
    """A reply and the position behind it: int, bytes, None, a list of these, or a ReplyError as a value. Raises
    Incomplete and ProtocolError."""
    end = data.find(b"\r\n", start)
    if end < 0:
        raise Incomplete
    kind, line, end = data[start : start + 1], data[start + 1 : end], end + 2
    if kind == b"+":
        return line, end
    if kind == b"-":
        return ReplyError(line.decode("utf-8", "replace")), end
    try:
        number = int(line)
    except ValueError:
        raise ProtocolError(repr(data[start : start + 20])) from None
    if kind == b":":
        return number, end
    if kind == b"$":
        if number >= 0 and len(data) < end + number + 2:
            raise Incomplete
        return (None, end) if number < 0 else (data[end : end + number], end + number + 2)
    if kind != b"*" or depth > MAX_DEPTH:
        raise ProtocolError(repr(data[start : start + 20]))
    items: list[Any] = []
    for _ in range(number):
        item, end = read(data, end, depth + 1)
        items.append(item)
    return (None if number < 0 else items), end


class Lane(asyncio.Protocol):
    """The connection. `closed` once it is lost, or was given up."""

    def __init__(self) -> None:
        self.closed = False
        self.replies = 0
        self._transport: asyncio.Transport
        self._row: deque[asyncio.Future[Any]] = deque()
        self._unread = b""

    def __repr__(self) -> str:
        return f"<Lane {'closed' if self.closed else f'{len(self._row)} under way'}>"

    @property
    def under_way(self) -> int:
        """Commands whose replies have not come, whether anybody waits for them or not."""
        return len(self._row)

    def send(self, command: Sequence[str | bytes | int]) -> asyncio.Future[Any]:
        """The future of its reply; it raises ReplyError or LaneClosed."""
        future = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_exception(LaneClosed())
        else:
            self._row.append(future)
            self._transport.write(packed(command))
        return future

    def close(self) -> None:
        """Give it up: nobody gets a reply any more."""
        if not self.closed:
            self._transport.abort()
            self.connection_lost(None)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data, at = self._unread + data, 0
        try:
            while self._row and at < len(data):
                reply, at = read(data, at)
                self._answer(reply)
        except Incomplete:
            pass
        except ProtocolError:
            self.close()
            return
        self._unread = data[at:]
        if self._unread and not self._row:
            self.close()  # a reply that nobody asked for: the row is not what the server thinks it is

    def _answer(self, reply: Any) -> None:
        self.replies += 1
        future = self._row.popleft()
        if future.done():
            return
        if isinstance(reply, ReplyError):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        while self._row:
            future = self._row.popleft()
            if not future.done():
                future.set_exception(LaneClosed())
