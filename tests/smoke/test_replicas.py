"""Four replicas as processes and one Valkey: under three times the load that the limits allow, far below them, and when
one of the replicas dies."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server, started
from tests.faults.fakes import Fake, FakeConnection, completion, event
from tests.faults.process import FULL, GatewayProcess, pool
from tests.faults.rawclient import RawClient, chat

pytestmark = pytest.mark.anyio

REPLICAS = 4
SECONDS = 20.0 if FULL else 6.0
USED_TOKENS = 100
JITTER = 2  # requests that arrive at the backend in another order than they were let through in


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


@dataclass
class Seen:
    """A backend's own record of whom it served when; it is what the limits are judged by."""

    at: dict[str, list[float]] = field(default_factory=dict)

    async def serve(self, connection: FakeConnection) -> None:
        while True:
            request = await connection.request()
            self.at.setdefault(request.json()["user"], []).append(time.monotonic())
            await connection.answer(completion(prompt=10, output=USED_TOKENS - 10))


def key(tenant: str) -> str:
    return f"Authorization: Bearer hr-{tenant}"


@asynccontextmanager
async def replicas(
    fake: Fake, store: Server, folder: Path, limits: dict[str, dict[str, Any]]
) -> AsyncIterator[list[GatewayProcess]]:
    """Gateways that have met."""
    tenants = {
        name: {"keys": [{"sha256": hashlib.sha256(f"hr-{name}".encode()).hexdigest()}], "limits": told}
        for name, told in limits.items()
    }
    config = pool(fake.url, concurrency=1000, tenants=tenants) | {"state": {"url": store.url}}
    config["security"] = {"secret": "env:SALTS"}
    async with AsyncExitStack() as stack:
        found = []
        for number in range(REPLICAS):
            (own := folder / f"replica{number}").mkdir()
            found.append(await stack.enter_async_context(GatewayProcess(config, own, {"SALTS": "of-the-tests"})))
        await asyncio.sleep(2.5)  # every beat, two seconds, they learn how many they are
        yield found


async def load(gateways: list[GatewayProcess], tenant: str, per_s: float, seconds: float, **fields: Any) -> int:
    """Open loop, in turn at each replica; how many requests were sent. A client that nobody waits for is used again."""
    idle: list[list[RawClient]] = [[] for _ in gateways]
    async with AsyncExitStack() as stack:

        async def one(place: int) -> None:
            if idle[place]:
                client = idle[place].pop()
            else:
                client = await stack.enter_async_context(RawClient(gateways[place].port))
            response = await client.ask(chat(key(tenant), user=tenant, **fields))
            assert response.status in (200, 429), response
            idle[place].append(client)

        begun, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as tasks:
            while (elapsed := time.monotonic() - begun) < seconds:
                while number < elapsed * per_s:
                    tasks.create_task(one(number % len(gateways)))
                    number += 1
                await asyncio.sleep(0.005)
    return number


async def calls(gateways: list[GatewayProcess]) -> float:
    """Round trips to the store, of all replicas."""
    return sum([await gateway.metric("headrace_limiter_calls_total") for gateway in gateways])


def judge(at: list[float], burst: float, per_s: float, seconds: float) -> None:
    """Never more than the limit and the burst in any window, and nearly all of it in the end."""
    for first in range(len(at)):
        for last in range(first, len(at), 3):
            assert last - first + 1 <= burst + (at[last] - at[first]) * per_s + JITTER
    assert len(at) >= 0.97 * (burst + seconds * per_s)


async def test_three_times_the_limit(valkey: Server, tmp_path: Path) -> None:
    """Two tenants limited by requests, one by tokens, of which it asks for twice what it uses."""
    limits = {
        "one": {"requests_per_minute": 900, "burst": "5%"},
        "two": {
            "requests_per_minute": 600,
            "burst": "10%",
            "models": {"m": {"requests_per_minute": 600, "burst": "5%"}},
        },
        "three": {"tokens_per_minute": 60_000, "burst": "10%"},
    }
    seen = Seen()
    async with Fake(seen.serve) as fake, replicas(fake, valkey, tmp_path, limits) as gateways:
        sent = await asyncio.gather(
            load(gateways, "one", 45, SECONDS),
            load(gateways, "two", 30, SECONDS),
            load(gateways, "three", 30, SECONDS, max_tokens=190),
        )
        for gateway in gateways:
            await gateway.idle()
    judge(seen.at["one"], 45, 15, SECONDS)
    judge(seen.at["two"], 30, 10, SECONDS)
    judge(seen.at["three"], 60, 10, SECONDS)
    assert all(len(seen.at[name]) < 0.7 * count for name, count in zip(limits, sent, strict=True))  # it was overload


async def test_far_below_the_limit_the_store_is_rarely_asked(valkey: Server, tmp_path: Path) -> None:
    """Less than once in ten requests."""
    limits: dict[str, dict[str, Any]] = {
        "one": {"requests_per_minute": 60_000, "tokens_per_minute": 10_000_000, "concurrent": 500},
    }
    async with Fake(Seen().serve) as fake, replicas(fake, valkey, tmp_path, limits) as gateways:
        before = await calls(gateways)
        sent = await load(gateways, "one", 200, SECONDS)
        assert (await calls(gateways) - before) / sent < 0.1
        for gateway in gateways:
            await gateway.settled()


async def test_a_killed_replicas_streams_are_free_again(valkey: Server, tmp_path: Path) -> None:
    """Fifty at once are all a tenant may have, and one replica runs them all when it is killed."""

    async def endless(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        while True:
            await connection.chunk(event("x"))
            await asyncio.sleep(0.5)

    async with (
        Fake(endless) as fake,
        replicas(fake, valkey, tmp_path, {"one": {"concurrent": 50}}) as gateways,
        AsyncExitStack() as stack,
    ):
        request, running = chat(key("one"), stream=True), 0
        while running < 50:
            client = await stack.enter_async_context(RawClient(gateways[0].port))
            await client.send(request)
            running += (begun := (await client.response(until=b"x")).status == 200)
            await asyncio.sleep(0.0 if begun else 0.1)  # until the other replica gives its share back
        await asyncio.sleep(3.0)  # they are renewed
        assert await status(gateways[1], request) == 429
        gateways[0].signal(signal.SIGKILL)
        died = time.monotonic()
        while await status(gateways[1], request) == 429:
            assert time.monotonic() - died < 15
            await asyncio.sleep(0.1)
        assert time.monotonic() - died > 2  # while they might have lived, they counted


async def status(gateway: GatewayProcess, request: bytes) -> int:
    async with RawClient(gateway.port) as client:
        await client.send(request)
        return (await client.response(until=b"x")).status
