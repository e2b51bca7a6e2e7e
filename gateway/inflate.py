"""Undoing a content encoding that nobody asked for: the gateway asks backends for identity, some compress anyway."""

from __future__ import annotations

import zlib

# What may come out of one piece that came in: JSON shrinks to a tenth or less, nothing honest to a hundredth.
MAX_GROWTH = 4 * 1024 * 1024
MAX_RATIO = 100

GZIP, ZLIB, RAW = 31, 15, -15  # zlib's numbers for what is around the compressed bytes


class Damaged(Exception):
    """The compressed bytes make no sense, end too early, or make too much of it."""


class Inflater:
    """gzip or deflate to plain bytes, piece by piece. What claims an encoding but is plain passes as it is."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._head = b""
        self._plain = False
        self._inflate = zlib.decompressobj(GZIP)
        self._begun = False

    def feed(self, data: bytes) -> bytes:
        """Raises Damaged for damaged data and for a decompression bomb."""
        if self._plain:
            return data
        try:
            if self._begun:
                return self._grown(data)
            data = self._head + data
            if len(data) < 2:  # too little to tell
                self._head = data
                return b""
            self._head, self._begun = b"", True
            return self._first(data)
        except zlib.error as error:
            raise Damaged(f"its compressed body is damaged ({error})") from None

    def end(self) -> bytes:
        """No more will come. Returns what was held back. Raises Damaged where the compressed bytes are not at their
        end."""
        if self._begun and not self._plain and not self._inflate.eof:
            raise Damaged("its compressed body is cut off")
        held, self._head = self._head, b""
        return held

    def _first(self, data: bytes) -> bytes:
        """RFC 9110 means zlib by `deflate`; half of the world left the wrapper out."""
        if self._gzip:
            self._plain = not data.startswith(b"\x1f\x8b")
            return data if self._plain else self._grown(data)
        wrapped = data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0
        self._inflate = zlib.decompressobj(ZLIB if wrapped else RAW)
        try:
            return self._grown(data)
        except zlib.error:
            if wrapped:
                raise
            self._plain = True
            return data

    def _grown(self, data: bytes) -> bytes:
        room = MAX_GROWTH + MAX_RATIO * len(data)
        pieces = []
        while data:
            piece = self._inflate.decompress(data, room)
            pieces.append(piece)
            room -= len(piece)
            if self._inflate.unconsumed_tail or room <= 0:
                raise Damaged("its compressed body grows beyond measure")
            data = self._inflate.unused_data.lstrip(b"\0") if self._gzip else b""
            if data:  # RFC 1952: another member may follow
                self._inflate = zlib.decompressobj(GZIP)
        return b"".join(pieces)


def inflater(encoding: bytes) -> Inflater | None:
    """None for identity, and for encodings that are passed on for the client to undo."""
    name = encoding.strip().lower()
    return Inflater(gzip=name != b"deflate") if name in (b"gzip", b"x-gzip", b"deflate") else None
