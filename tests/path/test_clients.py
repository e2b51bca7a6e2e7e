"""Clients that read slowly, send too much, or break rules: what they get, and what they may cost."""

from __future__ import annotations

import pytest

from gateway.errors import ClientGone
from tests.faults.fakes import Fake, FakeConnection, event, healthy
from tests.faults.process import pool
from tests.faults.rawclient import chat
from tests.path.house import House

pytestmark = pytest.mark.anyio


async def long_answer(connection: FakeConnection) -> None:
    """A stream, or a JSON body, of 1 MB."""
    while True:
        stream = (await connection.request()).json()["stream"]
        await connection.stream_head("text/event-stream" if stream else "application/json")
        for _ in range(100):
            await connection.chunk(event("x" * 10_000) if stream else b"x" * 10_000)
        await connection.chunk(event(finish="stop"))
        await connection.last_chunk()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_takes_nothing_is_cut_off(stream: bool) -> None:
    """The backend is held back meanwhile; after a minute, which is told by hand here, the connection is cut, nothing
    is written into the stream that could be taken for its end, and all is given back."""
    async with Fake(long_answer) as a, House(pool(a.url), [a]) as house:
        wire = house.connect()
        wire.taking = False
        wire.feed(chat(stream=stream))
        await house.eventually(lambda: wire.get_write_buffer_size() > 64 * 1024, "the answer is written")
        assert wire.get_write_buffer_size() < 300_000
        house.gateway.upstream.fail_all(ClientGone("It took nothing for too long.", "client_stalled"))
        await house.eventually(lambda: not house.remains(), "everything is given back")
        await house.eventually(lambda: wire.closed, "the connection is cut")
        wire.take()
        assert b"error" not in wire.sent
        assert not wire.response().complete
        assert [line["outcome"] for line in house.lines] == ["client_stalled"]


async def test_a_client_that_takes_no_answers_gets_no_more_of_them() -> None:
    """It pipelines requests and does not read: some answers are written, then no request is begun until it reads, and
    then all of them are answered in order."""

    async def script(connection: FakeConnection) -> None:
        while True:
            number = (await connection.request()).json()["seed"]
            await connection.answer(b'{"n":%d,"pad":"%b"}' % (number, b"x" * 40_000))

    async with Fake(script) as a, House(pool(a.url), [a]) as house:
        wire = house.connect()
        wire.taking = False
        for number in range(50):
            wire.feed(chat(seed=number))
        await house.eventually(lambda: wire.get_write_buffer_size() > 64 * 1024, "some answers are written")
        await house.eventually(lambda: not house.remains(), "nothing is under way")
        begun = a.hits
        assert begun < 5
        assert wire.get_write_buffer_size() < 64 * 1024 + 2 * 41_000
        while len(house.lines) < 50:
            assert a.hits - begun < 5
            begun = a.hits
            wire.take()
            wire.taking = len(house.lines) > 40
            await house.eventually(
                lambda: (wire.get_write_buffer_size() > 64 * 1024 and not house.remains()) or len(house.lines) == 50,
                "a few more",
            )
        wire.take()
        answers = [piece.split(b",")[0] for piece in wire.sent.split(b'{"n":')[1:]]
        assert answers == [b"%d" % number for number in range(50)]


async def test_a_client_that_leaves_before_it_took_its_answers_is_forgotten() -> None:
    """The requests that wait behind them are never begun."""
    async with Fake(healthy) as a, House(pool(a.url), [a]) as house:
        wire = house.connect()
        wire.taking = False
        for _ in range(1000):
            wire.feed(chat())
        await house.eventually(lambda: wire.get_write_buffer_size() > 64 * 1024, "some answers are written")
        await house.eventually(lambda: not house.remains(), "nothing is under way")
        wire.resume_reading()
        wire.leave()
        await house.eventually(lambda: wire.closed and not house.remains(), "everything is given back")
        assert house.faults == []
        assert (await house.ask(chat())).status == 200
