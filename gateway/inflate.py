"""Undoing a content encoding that nobody asked for: the gateway asks backends for identity, some compress anyway."""

from __future__ import annotations

import zlib

MAX_GROWTH = 4 * 1024 * 1024  # bytes out of one piece in: far above any honest ratio of a 64 KiB read


class Damaged(Exception):
    """The compressed bytes make no sense, or too much of it."""


class Inflater:
    """gzip or deflate to plain bytes, piece by piece. What claims an encoding but is plain passes as it is."""

    def __init__(self) -> None:
        self._inflate = _begin()
        self._first = b""
        self._plain = False

    @property
    def finished(self) -> bool:
        """Whether the body may end here."""
        return self._plain or self._inflate.eof or not self._first

    def feed(self, data: bytes) -> bytes:
        """Raises Damaged for damaged data and for a decompression bomb."""
        if len(self._first) < 2:
            data = self._first + data
            self._first = data[:2]
            if len(data) < 2:
                return b""
            self._plain = not _packed(data)
        return data if self._plain else self._unpacked(data)

    def _unpacked(self, data: bytes) -> bytes:
        out: list[bytes] = []
        room = MAX_GROWTH
        while data:
            if self._inflate.eof:
                self._inflate = _begin()  # a body may have several members (RFC 1952, 2.2)
            try:
                out.append(self._inflate.decompress(data, room))
            except zlib.error as error:
                raise Damaged(f"its compressed body is damaged ({error})") from None
            room -= len(out[-1])
            if self._inflate.unconsumed_tail or room <= 0:
                raise Damaged("its compressed body grows beyond measure")
            data = self._inflate.unused_data
        return b"".join(out)


def _packed(data: bytes) -> bool:
    """Whether data begins as gzip (RFC 1952, 2.3.1) or zlib (RFC 1950, 2.2) does."""
    return data.startswith(b"\x1f\x8b") or (data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0)


def _begin() -> zlib._Decompress:
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)


def inflater(encoding: bytes) -> Inflater | None:
    """None for identity, and for encodings that are passed on for the client to undo."""
    return Inflater() if encoding.strip().lower() in (b"gzip", b"x-gzip", b"deflate") else None
