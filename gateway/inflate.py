"""Undoing a content encoding that nobody asked for: the gateway asks backends for identity, some compress anyway."""

from __future__ import annotations

import zlib

MAX_GROWTH = 4 * 1024 * 1024  # bytes out of one piece in: far above any honest ratio of a 64 KiB read


class Damaged(Exception):
    """The compressed bytes make no sense, or too much of it."""


class Inflater:
    """gzip or deflate to plain bytes, piece by piece. What claims an encoding but is plain passes as it is."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        self._started = False
        self._plain = False

    def feed(self, data: bytes) -> bytes:
        """Raises Damaged for damaged data and for a decompression bomb."""
        if self._plain or not data:
            return data
        try:
            plain = self._inflate.decompress(data, MAX_GROWTH)
        except zlib.error as error:
            if self._started:
                raise Damaged(f"its compressed body is damaged ({error})") from None
            self._plain = True
            return data
        self._started = True
        if self._inflate.unconsumed_tail:
            raise Damaged("its compressed body grows beyond measure")
        return plain


def inflater(encoding: bytes) -> Inflater | None:
    """None for identity, and for encodings that are passed on for the client to undo."""
    return Inflater() if encoding.strip().lower() in (b"gzip", b"x-gzip", b"deflate") else None
