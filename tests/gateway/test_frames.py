"""Events end at blank lines, whatever ends a line; their fields are read as the standard says."""

from __future__ import annotations

from itertools import product

import pytest

from gateway.frames import HEAD_BYTES, TAIL_BYTES, Excerpt, event_end, fields, skip_line_ends


def first_blank_line(data: bytes) -> int:
    """The plain reading of the standard, byte by byte: the oracle."""
    ends, at = 0, 0
    while at < len(data):
        step = 2 if data[at : at + 2] == b"\r\n" else 1
        ends = ends + 1 if data[at] in b"\r\n" else 0
        at += step
        if ends == 2:
            return at
    return -1


def test_an_event_ends_at_its_first_blank_line() -> None:
    """All strings over {a, CR, LF} up to eight bytes, against the oracle. Only a final LF CR has to wait: LF may
    follow, and then the two are one line end."""
    for length in range(9):
        for letters in product(b"a\r\n", repeat=length):
            data = bytes(letters)
            expected = first_blank_line(data)
            if expected == length and data.endswith(b"\n\r"):
                expected = -1
            assert event_end(data) == expected, data


def test_the_search_starts_where_it_is_told() -> None:
    """An earlier blank line is not found again."""
    assert event_end(b"a\n\nb\n\n", 3) == 6
    assert event_end(b"a\r\n\r\nb\r\n\r\n", 5) == 10
    assert event_end(b"a\n\nb\n", 3) == -1


@pytest.mark.parametrize(("start", "expected"), [(0, 0), (1, 5), (5, 5), (6, 6)])
def test_line_ends_between_events_are_skipped(start: int, expected: int) -> None:
    """Any number of them, in any mixture, to the end of the data at most."""
    assert skip_line_ends(b"a\r\n\n\rb", start) == expected


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: x\n\n", (b"", b"x")),
        (b"data: x\r\n\r\n", (b"", b"x")),
        (b"data: x\r\r", (b"", b"x")),
        (b"data:x\n\n", (b"", b"x")),
        (b"data:  x\n\n", (b"", b" x")),
        (b"data: x", (b"", b"x")),
        (b"\xef\xbb\xbfdata: x\n\n", (b"", b"x")),
        (b"event: e\ndata: x\n\n", (b"e", b"x")),
        (b"event:e\ndata:x\n\n", (b"e", b"x")),
        (b"data: x\nevent: e\n\n", (b"e", b"x")),
        (b"event: e\r\ndata: x\r\n\r\n", (b"e", b"x")),
        (b"data: x\ndata: y\n\n", (b"", b"x\ny")),
        (b"data: x\rdata: y\n\n", (b"", b"x\ny")),
        (b"data: x\n: note\ndata\ndata:y\nid: 7\nretry: 1\n\n", (b"", b"x\n\ny")),
        (b"data:\n\n", (b"", b"")),
        (b": comment\n\n", (b"", b"")),
        (b"event: ping\n\n", (b"ping", b"")),
        (b"retry: 1000\n\n", (b"", b"")),
        (b"database: x\n\n", (b"", b"")),
        (b" data: x\n\n", (b"", b"")),
    ],
)
def test_fields_of_an_event(event: bytes, expected: tuple[bytes, bytes]) -> None:
    """Line ends, the optional space, several data lines, comments, and fields that mean nothing here."""
    assert fields(event) == expected


def test_an_excerpt_keeps_both_ends_and_nothing_else() -> None:
    """However the bytes come, its head and tail are those of the whole, and its size is bounded."""
    whole = bytes(range(256)) * 1024
    for piece in (1000, 1024, 40_000, 100_000):
        start = 2 * HEAD_BYTES
        excerpt = Excerpt(whole[:start])
        for at in range(start, len(whole), piece):
            excerpt.add(whole[at : at + piece])
            assert len(excerpt._tail) <= 3 * TAIL_BYTES
        assert excerpt.head == whole[:HEAD_BYTES]
        assert excerpt.tail == whole[-TAIL_BYTES:]
        assert excerpt.last(3) == whole[-3:]
        assert repr(excerpt) == f"<Excerpt of {len(whole)} bytes>"
