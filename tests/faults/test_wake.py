"""Pools that may be scaled to zero."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fakes import Fake, healthy
from tests.faults.process import GatewayProcess, pool
from tests.faults.rawclient import RawClient, Response, ask, chat

pytestmark = pytest.mark.anyio
ADMIN = {"admin_token": "env:ADMIN_TOKEN"}
QUICK = {"health": {"interval": "50ms", "unhealthy_after": 1, "healthy_after": 1}}


@pytest.fixture
async def asleep() -> AsyncIterator[Fake]:
    """A backend that is not there yet."""
    async with Fake(healthy) as fake:
        await fake.stop()
        yield fake
        await fake.start()


def sleepy(fake: Fake, **told: Any) -> dict[str, Any]:
    classes = {"interactive": {"max_wait": "300ms"}}  # shorter than any start: being held is no part of it
    wake = {"hold": "30s", "max_held": 3} | told
    return pool(fake.url, wake=wake, classes=classes, server=ADMIN, **QUICK)


async def held(gateway: GatewayProcess, count: int) -> None:
    async def so_many() -> bool:
        return await gateway.metric("headrace_held_requests", pool="p") == count

    await gateway.eventually(so_many, f"{count} are held")


async def down(gateway: GatewayProcess, fake: Fake) -> None:
    await gateway.eventually(lambda: (fake.url, "down") in gateway.states, "the backend is known to be down")


def asking(gateway: GatewayProcess, count: int) -> list[asyncio.Task[Response]]:
    return [asyncio.create_task(ask(gateway.port, chat(stream=number % 2 == 0))) for number in range(count)]


async def test_requests_wait_for_the_first_backend(asleep: Fake, tmp_path: Path) -> None:
    """They call for it, and are answered when it comes; what is more than may be held is refused at once."""
    async with GatewayProcess(sleepy(asleep), tmp_path) as gateway:
        await down(gateway, asleep)
        assert await gateway.metric("headrace_wakeup_wanted", pool="p") == 0
        tasks = asking(gateway, 3)
        await held(gateway, 3)
        assert await gateway.metric("headrace_wakeup_wanted", pool="p") == 1
        refused = await ask(gateway.port, chat())
        assert (refused.status, refused.header("x-headrace-reason")) == (503, "no_backend")
        await asyncio.sleep(0.4)  # longer than their class may wait in a queue
        await asleep.start()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 3
        assert await gateway.metric("headrace_wakeup_wanted", pool="p") == 0
        await held(gateway, 0)
        await gateway.idle([asleep])
        await asleep.stop()


@pytest.mark.parametrize("by", ["the pool", "the client"])
async def test_nobody_is_held_longer_than_told(asleep: Fake, tmp_path: Path, by: str) -> None:
    """By the pool or by the client; the call for capacity stands a while longer, for whoever looks seldom."""
    lines = ["x-headrace-deadline: 300ms"] if by == "the client" else []
    config = sleepy(asleep) if by == "the client" else sleepy(asleep, hold="300ms")
    async with GatewayProcess(config, tmp_path) as gateway:
        await down(gateway, asleep)
        refused = await ask(gateway.port, chat(*lines))
        assert (refused.status, refused.header("x-headrace-reason")) == (503, "no_backend")
        await gateway.eventually(lambda: gateway.lines, "it is logged")
        assert 299 < gateway.lines[0]["total_ms"] < 5000  # timers of the loop count whole milliseconds
        assert await gateway.metric("headrace_wakeup_wanted", pool="p") == 1
        await held(gateway, 0)


async def test_who_is_held_can_leave_and_is_told_of_the_end(asleep: Fake, tmp_path: Path) -> None:
    """A client that goes away frees its place; at the end of the process, and of `wake`, the others get a refusal."""
    async with GatewayProcess(sleepy(asleep), tmp_path) as gateway:
        await down(gateway, asleep)
        async with RawClient(gateway.port) as client:
            await client.send(chat())
            await held(gateway, 1)
        await held(gateway, 0)
        tasks = asking(gateway, 1)
        await held(gateway, 1)
        await gateway.reloaded(pool(asleep.url, server=ADMIN, **QUICK))
        assert (await tasks[0]).header("x-headrace-reason") == "no_backend"
        await gateway.reloaded(sleepy(asleep))
        tasks = asking(gateway, 2)
        await held(gateway, 2)
        gateway.signal(signal.SIGTERM)
        answers = await asyncio.gather(*tasks)
        assert [answer.error()["code"] for answer in answers] == ["server_shutting_down"] * 2
        assert await gateway.wait(10) == 0


async def test_a_fallback_serves_while_its_pool_is_called(asleep: Fake, tmp_path: Path) -> None:
    """Nobody waits who can be served elsewhere."""
    async with Fake(healthy) as other:
        config = sleepy(asleep)
        config["models"]["m"]["fallback"] = ["q"]
        config["pools"]["q"] = pool(other.url)["pools"]["p"]
        async with GatewayProcess(config, tmp_path) as gateway:
            await down(gateway, asleep)
            assert (await ask(gateway.port, chat())).status == 200
            assert await gateway.metric("headrace_wakeup_wanted", pool="p") == 1
