"""What those are told who get no place."""

from __future__ import annotations

import pytest

from policies.waiting import WaitingRoom
from tests.faults.fakes import Fake, FakeConnection
from tests.faults.process import pool
from tests.faults.rawclient import chat
from tests.path.house import House

pytestmark = pytest.mark.anyio


async def holding(connection: FakeConnection) -> None:
    await connection.request()
    await connection.wait_closed()


async def test_a_refusal_looks_through_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait there, and however fast refusals come, each costs the same."""

    def searched(*_: object) -> tuple[int, int]:
        raise AssertionError

    monkeypatch.setattr(WaitingRoom, "ahead", searched)
    async with Fake(holding) as fake:
        config = pool(fake.url, concurrency=1, classes={"interactive": {"max_queued": 1, "max_wait": "60s"}})
        async with House(config, [fake]) as house:
            runs, waits = house.connect(), house.connect()
            runs.feed(chat(stream=True))
            await house.eventually(lambda: fake.open_requests, "the only place is taken")
            waits.feed(chat(stream=True))
            scheduler = house.gateway.dispatcher.pools["p"].scheduler
            await house.eventually(lambda: len(scheduler._room), "the only place in the queue, too")
            response = await house.ask(chat())
            assert (response.status, response.header("x-headrace-reason")) == (503, "queue_full")
            assert ": 1 requests wait, some 0 s of work." in response.json()["error"]["message"]
            for wire in (runs, waits):
                wire.leave()
            await house.eventually(lambda: not house.remains(), "all have left")
