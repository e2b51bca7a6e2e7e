"""Faults after the first byte, and at the moment of committing a status. Each test is named by its public case."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, event, healthy
from tests.faults.process import GatewayProcess, pool
from tests.faults.rawclient import ask, chat

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("end", ["fin", "reset"])
async def test_b020_a_stream_cut_short_ends_with_one_error_frame(tmp_path: Path, end: str) -> None:
    """40 of 60 events, then FIN or RST: exactly these 40, then one error frame, no [DONE]; counted as truncated."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        for number in range(40):
            await connection.chunk(event(f"t{number}"))
        await asyncio.sleep(0.05)
        connection.fin() if end == "fin" else connection.reset()

    async with Fake(script) as fake, GatewayProcess(pool(fake.url), tmp_path) as gateway:
        response = await ask(gateway.port, chat(stream=True))
        events = response.body.split(b"\n\n")
        assert response.status == 200
        assert response.complete
        assert [f"t{number}".encode() in sent for number, sent in enumerate(events[:40])] == [True] * 40
        assert events[40].startswith(b'data: {"error":')
        assert events[41:] == [b""]
        assert b"[DONE]" not in response.body
        assert await gateway.outcomes() == {"upstream_truncated": 1}
        assert await gateway.metric("headrace_upstream_failures_total", reason="upstream_truncated") == 1
        await gateway.settled([fake])


async def test_a_healthy_stream_passes(tmp_path: Path) -> None:
    """The harness itself: five tokens, usage counted, the connection kept."""
    async with Fake(healthy) as fake, GatewayProcess(pool(fake.url), tmp_path) as gateway:
        response = await ask(gateway.port, chat(stream=True))
        assert response.body.endswith(DONE)
        assert b"usage" not in response.body
        assert await gateway.metric("headrace_tokens_total", direction="output") == 5
        response = await ask(gateway.port, chat())
        assert response.status == 200
        assert response.json()["choices"][0]["message"]["content"] == "hello"
        assert fake.accepts == 1
        assert await gateway.outcomes() == {"ok": 2}
        await gateway.settled([fake])
