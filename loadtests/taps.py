"""Taps: what may stand between a handler and the wire, from which faults are made. See `loadtests.httpd`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from loadtests.httpd import Piece, Reply, Tap

TEXT_FIELD = re.compile(rb'"(?:content|text|delta|partial_json|arguments)":"')
FRAMING = re.compile(rb"transfer-encoding: chunked|content-length: \d+")
FILL_PAUSE_S = 0.005
MOST_BEHIND = 1 << 18  # bytes of an endless answer that nobody reads: the emulator's own memory stays bounded


def at(after: float, act: Callable[[Reply, bytes], None]) -> Tap:
    """A tap that lets `after` body pieces pass and then calls `act` with the next one, or with nothing at the end.

    Of a whole answer half of the body passes."""

    def tap(reply: Reply, piece: Piece, passing: bytes) -> None:
        if piece is Piece.HEAD or (reply.chunked and piece is Piece.BODY and reply.bodies < after):
            reply.put(piece, passing)
        else:
            reply.tap = None
            if not reply.chunked:
                reply.raw(passing[: len(passing) // 2])
            act(reply, passing)

    return tap


def endless(reply: Reply, filling: bytes) -> None:
    """Send it for ever, as fast as it is read."""
    if reply.connection.behind() < MOST_BEHIND:
        reply.raw(filling)
    reply.later(FILL_PAUSE_S, partial(endless, reply, filling))


def edited(reply: Reply, piece: Piece, passing: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """The piece with the first body edited; the length of a whole answer is then no longer declared."""
    if piece is Piece.HEAD and not reply.chunked:
        reply.chunked = True
        return reframed(passing, b"transfer-encoding: chunked")
    return edit(passing) if piece is Piece.BODY and not reply.bodies else passing


def with_text(passing: bytes, text: bytes) -> bytes:
    """An event with `text` put in front of what it says; unchanged if it says nothing."""
    found = list(TEXT_FIELD.finditer(passing))
    return passing[: found[-1].end()] + text + passing[found[-1].end() :] if found else passing


class Paced:
    """A tap that cuts pieces up and sends the parts in order, with a pause between."""

    def __init__(self, pause_s: float, cut: Callable[[bytes], Iterable[bytes]]) -> None:
        self.pause_s, self.cut = pause_s, cut
        self.queue: deque[tuple[Piece, bytes]] = deque()
        self.busy = False

    def __call__(self, reply: Reply, piece: Piece, passing: bytes) -> None:
        self.queue += [(piece, part) for part in (self.cut(passing) if passing else (b"",))]
        if not self.busy:
            self.pump(reply)

    def pump(self, reply: Reply) -> None:
        self.busy = bool(self.queue)
        if self.queue:
            reply.put(*self.queue.popleft())
            reply.later(self.pause_s, partial(self.pump, reply))


def reframed(head: bytes, framing: bytes) -> bytes:
    """The head with another way to tell where the body ends."""
    return FRAMING.sub(framing, head, count=1)
