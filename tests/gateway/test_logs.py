"""Log lines on their way out."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Iterator

import pytest

from gateway.fleet import BackendLine, _write
from gateway.logs import MAX_PENDING, PIECE, JsonFormatter, LogWriter, as_text

pytestmark = pytest.mark.anyio


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reading and writing end, blocking as a shell makes them."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


async def test_a_reader_that_stands_still_holds_nobody_up(pipe: tuple[int, int]) -> None:
    """Lines wait for it up to their bound, none is torn or lost below it, and it gets them when it reads on."""
    reading, writing = pipe
    log, sent = LogWriter(writing), [b"%d %b\n" % (number, b"x" * 100) for number in range(3 * MAX_PENDING)]
    for first in range(0, len(sent), 1000):
        for line in sent[first : first + 1000]:
            log.write(line)
        log.flush()
    kept = len(sent) - log.dropped
    assert MAX_PENDING <= kept < MAX_PENDING + 1000
    read = b""
    while read.count(b"\n") < kept:
        read += os.read(reading, 2**16)
        await asyncio.sleep(0)
        log.flush()
    assert read == b"".join(sent[:kept])


async def test_what_is_written_before_a_reader_comes_reaches_it_by_itself(pipe: tuple[int, int]) -> None:
    """Nothing else has to happen."""
    reading, writing = pipe
    log = LogWriter(writing)
    text = b"".join(b"%d\n" % number for number in range(50_000))
    log.write(text)
    read = b""
    while len(read) < len(text):
        read += await asyncio.to_thread(os.read, reading, 2**16)
    assert (read, log.dropped) == (text, 0)


async def test_pieces_end_with_lines() -> None:
    """Others write to the same place, and may come between two writes. A line of more than a piece is what it is."""
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # one message for each write
    with reading, writing:
        log = LogWriter(writing.fileno())
        for line in (b"x" * 3000, b"y" * 3000, b"z" * (PIECE + 10)):
            log.write(line + b"\n")
        log.flush()
        found = [reading.recv(2 * PIECE) for _ in range(4)]
    assert found == [b"x" * 3000 + b"\n", b"y" * 3000 + b"\n", b"z" * PIECE, b"z" * 10 + b"\n"]


async def test_a_reader_that_is_gone_costs_its_lines(pipe: tuple[int, int]) -> None:
    """They are counted."""
    log = LogWriter(os.dup(pipe[1]))
    os.close(pipe[0])
    log.write(b"one\n")
    log.write(b"two\n")
    log.flush()
    assert log.dropped == 2
    os.dup2(pipe[1], pipe[0])  # for the fixture to close


def test_every_kind_of_line_can_be_read_along() -> None:
    """Also one that tells of a backend, which has no outcome, status or path."""
    line = _write(BackendLine(1.0, "p", "http://b", "down", "it is gone"))
    assert as_text(line) == b"warning time=1.0 pool=p backend=http://b state=down why=it is gone event=backend\n"
    told = {"level": "info", "outcome": "ok", "status": 200, "path": "/v1/embeddings", "tenant": "", "total_ms": 1.5}
    assert as_text(json.dumps(told).encode()) == b"info ok 200 /v1/embeddings total_ms=1.5\n"


def test_what_is_no_request_is_one_line_of_json_too() -> None:
    """Also a report of several lines, a traceback, and half of a surrogate pair."""
    try:
        raise ValueError("of several\nlines")
    except ValueError as error:
        told = (type(error), error, error.__traceback__)
    record = logging.LogRecord("headrace", logging.ERROR, "", 0, "first\n%s \ud800 é", ("second",), told)
    text = JsonFormatter().format(record)
    line = json.loads(text)
    assert text.isascii() and "\n" not in text
    assert (line["level"], line["event"], line["message"]) == ("error", "log", "first\nsecond \ud800 é")
    assert line["traceback"].endswith("ValueError: of several\nlines")
