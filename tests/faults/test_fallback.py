"""Pools that stand in for others."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fakes import Fake, FakeConnection, healthy, silent
from tests.faults.process import DIGEST, KEY, GatewayProcess, pool
from tests.faults.rawclient import RawClient, ask, chat

pytestmark = pytest.mark.anyio


def two_pools(first: str, second: str, *, regions: tuple[str, str] = ("eu", "eu"), **told: Any) -> dict[str, Any]:
    """Model `m` in the first pool, and in the second when that cannot."""
    config = pool(first, models={"m": {"pool": "p", "fallback": ["q"]}}, **told)
    config["pools"]["q"] = pool(second)["pools"]["p"]
    for name, region in zip("pq", regions, strict=True):
        config["pools"][name]["backends"][0]["region"] = region
    return config


async def test_a_dead_pool_is_replaced_by_the_next(tmp_path: Path) -> None:
    """Whether it is found out by the request itself, or known already; it is counted, and the first serves again."""
    async with Fake(healthy) as a, Fake(healthy) as b:
        config = two_pools(a.url, b.url, health={"interval": "0s"})
        async with GatewayProcess(config, tmp_path) as gateway:
            assert (await ask(gateway.port, chat())).status == 200
            assert (a.hits, b.hits) == (1, 0)
            await a.stop()
            answers = [await ask(gateway.port, chat(stream=stream)) for stream in (True, False) * 5]
            assert {answer.status for answer in answers} == {200}
            assert b.hits == 10
            assert await gateway.metric("headrace_fallbacks_total", pool="p", to="q") == 10
            await a.start()

            async def back() -> bool:
                await ask(gateway.port, chat())
                return a.hits > 1

            await gateway.eventually(back, "the first pool serves again", timeout_s=10)
            await gateway.idle([a, b])


async def test_a_queue_without_hope_is_left_for_the_next_pool(tmp_path: Path) -> None:
    """The first pool is busy and its queue full: who comes then is served by the second; who waits, waits on."""
    async with Fake(silent) as a, Fake(healthy) as b:
        config = two_pools(a.url, b.url, concurrency=1, classes={"interactive": {"max_queued": 1}})
        async with GatewayProcess(config, tmp_path) as gateway, AsyncExitStack() as stack:
            running, waiting = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(2)]
            await running.send(chat(stream=True))
            await gateway.eventually(lambda: a.hits, "one runs")
            await waiting.send(chat(stream=True))
            await gateway.eventually(partial(gateway.metric, "headrace_queued_requests", pool="p"), "one waits")
            assert (await ask(gateway.port, chat())).status == 200
            assert (a.hits, b.hits) == (1, 1)
            assert await gateway.metric("headrace_fallbacks_total", pool="p", to="q") == 1
            assert await gateway.metric("headrace_queued_requests", pool="p") == 1


async def test_without_a_fallback_that_can_the_first_refusal_counts(tmp_path: Path) -> None:
    """Both are dead."""
    async with Fake(healthy) as a, Fake(healthy) as b:
        await a.stop()
        await b.stop()
        async with GatewayProcess(two_pools(a.url, b.url), tmp_path) as gateway:
            response = await ask(gateway.port, chat())
            assert response.status == 502
            assert response.header("x-should-retry") == "false"


async def test_a_fallback_does_not_leave_the_tenants_regions(tmp_path: Path) -> None:
    """An `eu` tenant's prompt is refused rather than sent elsewhere."""
    async with Fake(healthy) as a, Fake(healthy) as b:
        await a.stop()
        tenants = {"t": {"keys": [{"sha256": DIGEST}], "residency": ["eu"]}}
        config = two_pools(a.url, b.url, regions=("eu", "us"), tenants=tenants)
        async with GatewayProcess(config, tmp_path) as gateway:
            answers = [await ask(gateway.port, chat(f"Authorization: Bearer {KEY}")) for _ in range(4)]
            assert {answer.status for answer in answers} <= {502, 503}
            assert b.hits == 0


async def test_a_fallback_that_may_not_be_used_takes_no_retry(tmp_path: Path) -> None:
    """Its backends are all elsewhere: the client gets the backend's own words, and not that there is no backend."""

    async def busy(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.answer(b'{"error":{"message":"busy","type":"t"}}', "503 Service Unavailable")

    async with Fake(busy) as a, Fake(healthy) as b:
        tenants = {"t": {"keys": [{"sha256": DIGEST}], "residency": ["eu"]}}
        config = two_pools(a.url, b.url, regions=("eu", "us"), tenants=tenants)
        async with GatewayProcess(config, tmp_path) as gateway:
            response = await ask(gateway.port, chat(f"Authorization: Bearer {KEY}"))
            assert (response.status, response.json()["error"]["message"]) == (503, "busy")
            assert await gateway.metric("headrace_fallbacks_total") == 0
            assert await gateway.metric("headrace_requests_total", outcome="upstream_error") == 1
