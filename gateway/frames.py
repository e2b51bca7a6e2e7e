"""Where the events of a stream end, and which fields they hold. Bytes only: nothing is decoded here."""

from __future__ import annotations

import re

BOM = b"\xef\xbb\xbf"
LINE_ENDS = (b"\n", b"\r")
# The rest of an event is held back until its blank line is here, unless it is longer than this: then it passes as it
# comes, so that a stream costs constant memory. Ordinary events have 200 bytes; images and final responses megabytes.
HOLD_BYTES = 64 * 1024
HEAD_BYTES = 4 * 1024  # of a longer event: names, types and the first keys
TAIL_BYTES = 16 * 1024  # and its end: usage stands there, before at most 8 KiB of metadata in a Responses object

# A line ends with LF, CR or CRLF, and CRLF is one end, not two. (No possessive groups: Python 3.11.2 fails with them.)
BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")


def event_end(data: bytes | bytearray, start: int = 0) -> int:
    """The index behind the first blank line at or after `start`, where an event ends; -1 if there is none."""
    feed = data.find(b"\n", start)
    while feed >= 0 and data.find(b"\r", start, feed + 2) < 0:  # LF alone: four times faster than the pattern
        if data.startswith(b"\n", feed + 1):
            return feed + 2
        start = feed + 1
        feed = data.find(b"\n", start)
    if feed < 0 and data.find(b"\r", start) < 0:
        return -1
    blank = BLANK_LINE.search(data, start)
    if blank is None or (blank.end() == len(data) and data.endswith(b"\n\r")):  # its last CRLF is cut in two
        return -1
    return blank.end()


def skip_line_ends(data: bytes, start: int) -> int:
    """The index of the first byte at or after `start` that ends no line: between events, empty lines mean nothing."""
    while data.startswith(LINE_ENDS, start):
        start += 1
    return start


def fields(event: bytes) -> tuple[bytes, bytes]:
    """The name of an event and its data, several `data` lines joined by LF. Comments have neither."""
    name, (line, _, rest) = b"", event.partition(b"\n")
    if line.startswith(b"event: "):
        name, (line, _, rest) = line[7:], rest.partition(b"\n")
    if rest == b"\n" and line.startswith(b"data: ") and event.find(b"\r") < 0:
        return name, line[6:]  # as engines write it
    name, data = b"", []
    for line in event.removeprefix(BOM).splitlines():
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].removeprefix(b" ")
        elif line == b"data":
            data.append(b"")
    return name, b"\n".join(data)


class Excerpt:
    """The first `HEAD_BYTES` and the last `TAIL_BYTES` of something too long to keep."""

    __slots__ = ("_tail", "head", "size")

    def __init__(self, data: bytes) -> None:
        """`data` is longer than `HEAD_BYTES`."""
        self.head = data[:HEAD_BYTES]
        self.size = len(data)
        self._tail = bytearray(data[-TAIL_BYTES:])

    def __repr__(self) -> str:
        return f"<Excerpt of {self.size} bytes>"

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._tail += data[-TAIL_BYTES:]
        if len(self._tail) > 2 * TAIL_BYTES:  # not on every call: a byte is moved once on average
            del self._tail[:-TAIL_BYTES]

    def last(self, count: int) -> bytes:
        """The last `count` bytes, at most `TAIL_BYTES`."""
        return bytes(self._tail[-count:])

    @property
    def tail(self) -> bytes:
        return self.last(TAIL_BYTES)
