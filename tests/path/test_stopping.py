"""The gateway stops: who is told what, and when."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, event
from tests.faults.process import pool
from tests.faults.rawclient import Response, chat
from tests.path.house import House, Wire

pytestmark = pytest.mark.anyio


class Gate:
    """A backend that begins a stream and ends it when it is let."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def script(self, connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.stream_head()
            await connection.chunk(event("t0"))
            await self.open.wait()
            await connection.chunk(event(finish="stop") + DONE)
            await connection.last_chunk()


async def begun(house: House, wire: Wire) -> None:
    wire.feed(chat(stream=True))
    await house.eventually(lambda: b"t0" in wire.sent, "it runs")


def refused(response: Response) -> bool:
    return (response.status, response.error()["code"]) == (503, "server_shutting_down") and bool(
        response.header("retry-after")
    )


async def test_who_waits_is_refused_at_once_and_who_runs_goes_on() -> None:
    """503 with Retry-After for the queue and for new requests; the running stream comes to its end."""
    gate = Gate()
    async with Fake(gate.script) as a, House(pool(a.url, concurrency=1), [a]) as house:
        running, waiting = house.connect(), house.connect()
        await begun(house, running)
        waiting.feed(chat())
        await house.eventually(lambda: house.turns == 2, "it waits")
        house.gateway.stop_queueing()
        await house.eventually(lambda: waiting.response().complete, "it is told")
        assert refused(waiting.response())
        assert refused(await house.ask(chat()))
        assert not running.response().complete
        gate.open.set()
        await house.eventually(lambda: running.response().complete, "it ends")
        assert running.response().body.endswith(DONE)
        assert not house.remains()
        assert sorted(line["outcome"] for line in house.lines) == ["ok", "shutting_down", "shutting_down"]


async def told_when_it_ends(house: House, slow: Wire, *, turns: int) -> None:
    """The gateway stops while the last bytes of a request are missing; it is refused when they come."""
    request = chat()
    slow.feed(request[:-5])
    await house.eventually(lambda: house.turns == turns, "its body is read")
    house.gateway.stop_queueing()
    slow.feed(request[-5:])
    await house.eventually(lambda: slow.response().complete, "it is told")
    assert refused(slow.response())


async def test_a_request_that_arrives_slowly_does_not_wait_either() -> None:
    """It began before the stop and would have to queue behind it: refused, not left waiting for ever."""
    gate = Gate()
    async with Fake(gate.script) as a, House(pool(a.url, concurrency=1), [a]) as house:
        running, slow = house.connect(), house.connect()
        await begun(house, running)
        await told_when_it_ends(house, slow, turns=2)
        gate.open.set()
        await house.eventually(lambda: running.response().complete, "the other ends")
        assert not house.remains()


async def test_when_the_time_is_up_streams_end_with_an_error_frame() -> None:
    """On an event boundary, without [DONE], and the backend is left at once."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(event("t0"))
        await connection.wait_closed()

    async with Fake(script) as a, House(pool(a.url), [a]) as house:
        wire = house.connect()
        await begun(house, wire)
        house.gateway.stop_queueing()
        house.gateway.stop_running()
        await house.eventually(lambda: wire.response().complete, "it ends")
        assert b'"code":"server_shutting_down"' in wire.response().body.split(b"\n\n")[-2]
        assert b"[DONE]" not in wire.sent
        await house.eventually(lambda: not house.remains(), "everything is given back")
