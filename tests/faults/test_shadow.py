"""Copies of requests for a pool on trial."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fakes import Fake, FakeConnection, healthy, silent
from tests.faults.process import DIGEST, KEY, GatewayProcess, pool
from tests.faults.rawclient import ask, chat

pytestmark = pytest.mark.anyio


@pytest.fixture
async def real() -> AsyncIterator[Fake]:
    async with Fake(healthy) as fake:
        yield fake


@pytest.fixture
async def trial() -> AsyncIterator[Fake]:
    async with Fake(healthy) as fake:
        yield fake


async def rejecting(connection: FakeConnection) -> None:
    """Blames every request."""
    while True:
        await connection.request()
        await connection.answer(b'{"error":{"message":"no","type":"x","param":null,"code":"bad"}}', "400 Bad Request")


def shadowed(real: Fake, trial: Fake, **told: Any) -> dict[str, Any]:
    """Model `m` in pool `p`; all that is answered is copied to pool `q`."""
    shadow = {"pool": "q", "sample": "100%"} | told
    server = {"admin_token": "env:ADMIN_TOKEN"}
    config = pool(real.url, models={"m": {"pool": "p", "shadow": shadow}}, server=server)
    config["pools"]["q"] = pool(trial.url)["pools"]["p"]
    return config


async def copied(gateway: GatewayProcess, count: int, outcome: str) -> None:
    async def so_many() -> bool:
        return await gateway.metric("headrace_shadow_requests_total", model="m", outcome=outcome) == count

    await gateway.eventually(so_many, f"{count} copies end as {outcome}", timeout_s=10)


async def test_answered_requests_are_copied_and_nobody_notices(real: Fake, trial: Fake, tmp_path: Path) -> None:
    """The same bytes arrive there; requests, tokens and log lines are those of the originals alone."""
    async with GatewayProcess(shadowed(real, trial), tmp_path) as gateway:
        for stream in (True, False) * 3:
            assert (await ask(gateway.port, chat(stream=stream))).status == 200
        await copied(gateway, 6, "ok")
        assert sorted(each.body for each in trial.requests) == sorted(each.body for each in real.requests)
        assert await gateway.outcomes() == {"ok": 6}
        assert await gateway.metric("headrace_tokens_total", direction="input") == 6 * 11
        for version in ("original", "shadow"):
            assert await gateway.metric("headrace_shadow_ttft_seconds_count", version=version) == 3
        await gateway.settled([real, trial], sent=6, outcomes={"ok": 6})


async def test_a_share_of_the_requests_is_copied(real: Fake, trial: Fake, tmp_path: Path) -> None:
    """About as many as the sample says, and none that was not answered."""
    async with GatewayProcess(shadowed(real, trial, sample="50%", at_once=100), tmp_path) as gateway:
        for _ in range(60):
            assert (await ask(gateway.port, chat())).status == 200
        await gateway.idle([real, trial])
        assert 10 <= trial.hits <= 50
        await real.play(rejecting)
        before = trial.hits
        for _ in range(20):
            assert (await ask(gateway.port, chat())).status == 400
        await gateway.idle([real, trial])
        assert trial.hits == before


async def test_copies_that_hang_are_few_and_in_nobodys_way(real: Fake, trial: Fake, tmp_path: Path) -> None:
    """No more than may be under way at once; they end with their pool at a reload, and do not hold up a drain."""
    await trial.play(silent)
    config = shadowed(real, trial, at_once=2)
    config["pools"]["q"]["timeouts"] |= {"headers": "60s"}
    async with GatewayProcess(config, tmp_path) as gateway:
        for _ in range(8):
            assert (await ask(gateway.port, chat())).status == 200
        await copied(gateway, 6, "skipped")
        await gateway.eventually(lambda: trial.open_requests == 2, "two are under way")
        await gateway.reloaded(pool(real.url, server=config["server"]))
        await gateway.eventually(lambda: len(trial.closed) == 2, "they have ended")
        await gateway.reloaded(config)
        assert (await ask(gateway.port, chat())).status == 200
        await gateway.eventually(lambda: trial.hits == 3, "it is copied again")
        began = time.monotonic()
        gateway.signal(signal.SIGTERM)
        assert await gateway.wait(20) == 0
        assert time.monotonic() - began < 15  # of the 30 s that requests would have
        assert "Traceback" not in gateway.log
        assert "never retrieved" not in gateway.log


async def test_copies_that_fail_cost_nobody_anything(real: Fake, trial: Fake, tmp_path: Path) -> None:
    """Rejected, or no backend there at all: each has its word, the originals their answers, retries are not used."""
    async with GatewayProcess(shadowed(real, trial), tmp_path) as gateway:
        await trial.play(rejecting)
        assert (await ask(gateway.port, chat())).status == 200
        await copied(gateway, 1, "upstream_rejected")
        await trial.stop()
        assert (await ask(gateway.port, chat())).status == 200
        await copied(gateway, 1, "upstream_error")
        assert await gateway.outcomes() == {"ok": 2}
        await trial.start()


async def test_a_copy_does_not_leave_the_tenants_regions(real: Fake, trial: Fake, tmp_path: Path) -> None:
    """An `eu` tenant's prompt is not copied to `us`."""
    config = shadowed(real, trial)
    config["tenants"] = {"t": {"keys": [{"sha256": DIGEST}], "residency": ["eu"]}}
    for name, region in (("p", "eu"), ("q", "us")):
        config["pools"][name]["backends"][0]["region"] = region
    async with GatewayProcess(config, tmp_path) as gateway:
        assert (await ask(gateway.port, chat(f"Authorization: Bearer {KEY}"))).status == 200
        await copied(gateway, 1, "no_backend")
        assert trial.hits == 0
