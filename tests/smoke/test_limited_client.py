"""A client that goes by the headers of its answers alone, as OpenAI advises: it is never refused, and gets nearly all
that it may have."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.contract.servers import started
from tests.faults.fakes import Fake, FakeConnection, completion
from tests.faults.process import DIGEST, FULL, KEY, GatewayProcess, pool
from tests.faults.rawclient import RawClient, chat

pytestmark = pytest.mark.anyio

SECONDS = 20.0 if FULL else 6.0
LIMIT, BURST = 60_000, 6_000  # tokens a minute, and at one moment
PROMPT, MOST = 30, 200  # tokens that a request asks for
GO = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")


def seconds(told: str) -> float:
    """A duration of a header."""
    found = GO.fullmatch(told)
    assert found, told
    hours, minutes, whole, ms = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + whole + ms / 1000


async def serve(connection: FakeConnection) -> None:
    """Answers are shorter than they might be."""
    rng = Random(1)
    while True:
        await connection.request()
        await asyncio.sleep(0.01)
        await connection.answer(completion(prompt=PROMPT, output=rng.randrange(20, MOST)))


@pytest.fixture(params=["memory", "shared"])
async def gateways(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[GatewayProcess]]:
    """One gateway; or three that share a store."""
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(Fake(serve))
        tenant = {"keys": [{"sha256": DIGEST}], "limits": {"tokens_per_minute": LIMIT, "burst": "10%"}}
        config: dict[str, Any] = pool(fake.url, concurrency=100, tenants={"t": tenant})
        count = 1
        if request.param == "shared":
            (tmp_path / "store").mkdir()
            config["state"] = {"url": stack.enter_context(started("valkey", tmp_path / "store")).url}
            count = 3
        found = []
        for number in range(count):
            (own := tmp_path / f"replica{number}").mkdir()
            found.append(await stack.enter_async_context(GatewayProcess(config, own)))
        if count > 1:
            await asyncio.sleep(2.5)  # until they have met
        yield found


async def test_a_client_that_follows_its_headers_is_never_refused(gateways: list[GatewayProcess]) -> None:
    """Before each request it waits until enough should be there again, and no longer."""
    content = "x" * 4 * PROMPT
    request = chat(f"Authorization: Bearer {KEY}", messages=[{"role": "user", "content": content}], max_tokens=MOST)
    need = MOST + 2 * PROMPT
    used = 0
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(gateway.port)) for gateway in gateways]
        begun, number = time.monotonic(), 0
        while time.monotonic() - begun < SECONDS:
            response = await clients[number % len(clients)].ask(request)
            assert response.status == 200, (number, response.body, response.headers)
            number += 1
            used += response.json()["usage"]["total_tokens"]
            remaining = int(response.header("x-ratelimit-remaining-tokens") or "")
            reset_s = seconds(response.header("x-ratelimit-reset-tokens") or "")
            assert int(response.header("x-ratelimit-limit-tokens") or "") == LIMIT
            assert reset_s == pytest.approx((BURST - remaining) / (LIMIT / 60), abs=0.01)
            if remaining < need:
                await asyncio.sleep(reset_s * (need - remaining) / (BURST - remaining))
    assert used >= 0.9 * (BURST + (time.monotonic() - begun) * LIMIT / 60)
