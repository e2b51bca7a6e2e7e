"""A request of a tenant that must stay in a region stays there, whatever its pool does to get it answered."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy
from tests.faults.process import DIGEST, KEY, pool
from tests.faults.rawclient import chat
from tests.path.house import House

pytestmark = pytest.mark.anyio

AUTH = f"Authorization: Bearer {KEY}"


def moody() -> Any:
    """Serves, refuses, stalls and breaks off, in turn."""
    turn = 0

    async def script(connection: FakeConnection) -> None:
        nonlocal turn
        while True:
            await connection.request()
            turn += 1
            if turn % 4 == 1:
                await connection.answer(b"{}", "503 Service Unavailable")
            elif turn % 4 == 2:
                await connection.stream_head()
                await connection.wait_closed()
                return
            elif turn % 4 == 3:
                connection.fin()
                return
            else:
                await connection.stream_head()
                await connection.chunk(event("t") + event(finish="stop") + DONE)
                await connection.last_chunk()

    return script


@pytest.mark.parametrize("residency", [["eu"], []])
async def test_nothing_that_is_tried_leaves_the_region(residency: list[str]) -> None:
    """Retries, hedges, a fallback, a canary for everybody and copies of everything: with backends that fail at home and
    healthy ones abroad, nobody abroad hears of it. A tenant that may go anywhere is served by them."""
    async with AsyncExitStack() as stack:
        home = [await stack.enter_async_context(Fake(moody())) for _ in range(2)]
        near, later, new, trial = [await stack.enter_async_context(Fake(healthy)) for _ in range(4)]
        abroad = [near, later, new, trial]
        retries = {"attempts": 3, "budget": "100%", "hedge": {"after": "20ms"}}
        clocks = {"first_token": "500ms", "headers": "500ms"}
        config = pool(*(fake.url for fake in [*home, near]), retries=retries, timeouts=clocks, routing="round_robin")
        for each, region in zip(config["pools"]["p"]["backends"], ("eu", "eu", "us"), strict=True):
            each["region"] = region
        for name, fake in (("later", later), ("new", new), ("trial", trial)):
            config["pools"][name] = pool(fake.url, retries=retries)["pools"]["p"]
            config["pools"][name]["backends"][0]["region"] = "us"
        config["models"]["m"] |= {
            "fallback": ["later"],
            "canary": {"pool": "new", "weight": "100%"},
            "shadow": {"pool": "trial", "sample": "100%"},
        }
        config["tenants"] = {"t": {"keys": [{"sha256": DIGEST}], "residency": residency}}
        async with House(config, [*home, *abroad]) as house:
            for number in range(24):
                wire = house.connect()
                wire.feed(chat(AUTH, stream=True))
                await house.eventually(lambda number=number: len(house.lines) == number + 1, "it is answered")  # type: ignore[misc]
                wire.leave()
            await asyncio.sleep(0.1)  # for copies
            heard = sum(fake.hits for fake in abroad)
            assert heard == 0 if residency else heard >= 24
            assert not residency or {line["backend"] for line in house.lines} == {fake.url for fake in home}
            assert not residency or any(line["attempts"] == 2 for line in house.lines)
            await house.eventually(lambda: not house.remains(), "nothing is left")
