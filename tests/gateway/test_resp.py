"""Redis replies: read whatever way they come, each by who asked for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.resp import Incomplete, Lane, LaneClosed, ProtocolError, ReplyError, packed, read

pytestmark = pytest.mark.anyio

WORDS = st.text("abcdef 0123", max_size=9)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.binary(max_size=40) | st.none(), lambda inner: st.lists(inner, max_size=5), max_leaves=12
)


def told(value: Any) -> bytes:
    """As a server says it."""
    if isinstance(value, list):
        return b"*%d\r\n%b" % (len(value), b"".join(map(told, value)))
    if isinstance(value, int):
        return b":%d\r\n" % value
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True


def opened() -> tuple[Lane, Transport]:
    lane, transport = Lane(), Transport()
    lane.connection_made(transport)
    return lane, transport


@given(VALUES, WORDS)
def test_what_is_told_is_read(value: Any, rest: str) -> None:
    """And what comes behind it is left."""
    data = told(value)
    assert read(data + rest.encode(), 0) == (value, len(data))


@given(VALUES, st.integers(0, 200))
def test_a_part_of_a_reply_is_none(value: Any, size: int) -> None:
    """However much of it has come."""
    data = told(value)
    with pytest.raises(Incomplete):
        read(data[: min(size, len(data) - 1)], 0)


@pytest.mark.parametrize("data", [b"?\r\n", b":x\r\n", b"HTTP/1.1 400\r\n", b"$x\r\n", b"*1\r\n" * 20 + b":1\r\n"])
def test_what_is_no_reply_is_told_so(data: bytes) -> None:
    """A server of another kind listens there, or one that means no good."""
    with pytest.raises(ProtocolError):
        read(data, 0)


def test_a_command_is_an_array_of_words() -> None:
    """Text, bytes and numbers."""
    assert packed(["SET", b"k\r\n", 17]) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$2\r\n17\r\n"


@given(st.lists(VALUES, min_size=1, max_size=8), st.lists(st.integers(1, 30), max_size=40), st.data())
def test_replies_reach_who_asked(values: list[Any], sizes: list[int], data: st.DataObject) -> None:
    """However they are cut, and whoever gave up waiting meanwhile."""
    left = {number for number in range(len(values)) if data.draw(st.booleans())}

    async def scene() -> None:
        lane, _ = opened()
        futures = [lane.send(["ECHO", number]) for number in range(len(values))]
        for number in left:
            futures[number].cancel()
        stream, at = b"".join(map(told, values)), 0
        for size in [*sizes, len(stream)]:
            if at < len(stream):
                lane.data_received(stream[at : at + size])
                at += size
        for number, value in enumerate(values):
            if number not in left:
                assert futures[number].result() == value
        assert not lane.closed
        assert lane.under_way == 0

    asyncio.run(scene())


async def test_a_refusal_is_raised_where_it_was_asked_for() -> None:
    """With its first word."""
    lane, _ = opened()
    refused, other = lane.send(["EVALSHA"]), lane.send(["PING"])
    lane.data_received(b"-NOSCRIPT No matching script.\r\n+PONG\r\n")
    with pytest.raises(ReplyError) as raised:
        await refused
    assert raised.value.word == "NOSCRIPT"
    assert await other == b"PONG"


async def test_a_lost_connection_ends_all_that_wait() -> None:
    """And nobody is sent on it any more."""
    lane, transport = opened()
    futures = [lane.send(["PING"]) for _ in range(3)]
    futures[0].cancel()
    lane.connection_lost(None)
    for future in [*futures[1:], lane.send(["PING"])]:
        with pytest.raises(LaneClosed):
            await future
    assert transport.sent == packed(["PING"]) * 3


@pytest.mark.parametrize("data", [b"+PONG\r\n+PONG\r\n", b"?\r\n"])
async def test_a_connection_out_of_step_is_given_up(data: bytes) -> None:
    """A reply too many means that another one went to the wrong place."""
    lane, transport = opened()
    future = lane.send(["PING"])
    lane.data_received(data)
    assert lane.closed and transport.aborted
    assert future.done()
    future.exception()
