"""Many clients at once, over real sockets, that leave at random points of their requests."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, completion, event, gathering, usage_event
from tests.faults.process import pool, times
from tests.faults.rawclient import RawClient, chat
from tests.path.house import House

pytestmark = pytest.mark.anyio

AT_ONCE = 60


def backend(rng: Random) -> Fake:
    """Answers after some milliseconds, piece by piece; now and then it refuses, breaks off, or says nothing."""

    async def script(connection: FakeConnection) -> None:
        while True:
            asked = (await connection.request()).json()
            await asyncio.sleep(rng.uniform(0.0, 0.01))
            fate = rng.random()
            if fate < 0.05:
                await connection.answer(b"{}", "503 Service Unavailable")
            elif fate < 0.1:
                await connection.wait_closed()
                return
            elif not asked["stream"]:
                await connection.answer(completion())
            elif not await streamed(connection, fate < 0.15):
                return

    async def streamed(connection: FakeConnection, breaks: bool) -> bool:
        await connection.stream_head()
        for number in range(rng.randrange(1, 8)):
            await connection.chunk(event(f"t{number}"))
            await asyncio.sleep(rng.uniform(0.0, 0.003))
        if breaks:
            connection.reset()
            return False
        await connection.chunk(event(finish="stop") + usage_event() + DONE)
        await connection.last_chunk()
        return True

    return Fake(script)


async def one(port: int, rng: Random) -> None:
    """A client that sends its request, or a part of it, and leaves within some milliseconds, by FIN or by RST."""
    request = chat(stream=rng.random() < 0.5, user="u" * rng.choice((0, 0, 100_000)))
    if rng.random() < 0.1:
        request = request[: rng.randrange(len(request))]
    async with RawClient(port) as client:
        await client.send(request)
        stays_s = rng.uniform(0.0, 0.04)
        with suppress(TimeoutError):
            await client.response(stays_s)
        client.close() if rng.random() < 0.5 else client.reset()


async def test_clients_that_leave_at_random_leave_nothing() -> None:
    """2,000 of them (300 in the ordinary suite): no place, no connection, no buffer, no descriptor; each request that
    was begun has exactly one record; and all places can be used."""
    rng = Random(2000)
    async with backend(rng) as a, backend(rng) as b:
        config = pool(a.url, b.url, concurrency=8, timeouts={"headers": "500ms", "first_token": "500ms"})
        async with House(config, [a, b]) as house:
            server = await asyncio.get_running_loop().create_server(house.protocol, "127.0.0.1", 0, backlog=AT_ONCE)
            async with server:
                port = server.sockets[0].getsockname()[1]
                before = descriptors()
                for _ in range(len(times(2000, 300)) // AT_ONCE):
                    await asyncio.gather(*(one(port, rng) for _ in range(AT_ONCE)))
                await house.eventually(lambda: not house.remains(), "everything is given back")
                await house.eventually(lambda: len(house.lines) == house.turns, "one record for each request")
                assert len({line["request_id"] for line in house.lines}) == house.turns
                outcomes = {line["outcome"] for line in house.lines}
                assert {"ok", "client_disconnect"} <= outcomes
                assert "internal_error" not in outcomes
                everybody = gathering(16)
                await a.play(everybody)
                await b.play(everybody)
                answers = await asyncio.gather(*(house.ask(chat()) for _ in range(16)))
                assert [answer.status for answer in answers] == [200] * 16
                await house.eventually(
                    lambda: descriptors() <= before + len(a.tasks) * 2 + len(b.tasks) * 2, "descriptors"
                )
            gc.collect()
            assert house.faults == []


def descriptors() -> int:
    return sum(1 for _ in Path(f"/proc/{os.getpid()}/fd").iterdir())
