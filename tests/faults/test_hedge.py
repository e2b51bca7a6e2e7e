"""A second attempt beside one that is slow to begin, against a real process: a pool with one backend that stalls."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.faults.fakes import DONE, Fake, FakeConnection, healthy
from tests.faults.process import GatewayProcess, pool
from tests.faults.rawclient import RawClient, ask, chat
from tests.faults.sink import CLIENT, SERVER, Sink, attributes

pytestmark = pytest.mark.anyio


PATIENT = {"headers": "1m", "first_token": "1m"}


async def stalled(connection: FakeConnection) -> None:
    """Takes every request, sends a head, and no more."""
    await connection.request()
    await connection.stream_head()
    await connection.wait_closed()


async def test_a_backend_that_stalls_costs_a_moment(tmp_path: Path) -> None:
    """Ten streams, one after another: those that go there are answered by the other one. Each attempt is a span of its
    own, of which the one that lost is no error, and each backend was told of its own."""
    async with Sink() as sink, Fake(stalled) as a, Fake(healthy) as b:
        config = pool(a.url, b.url, routing="round_robin", retries={"hedge": {"after": "300ms"}}, timeouts=PATIENT)
        config |= {"telemetry": {"otlp": sink.url, "sample": "100%"}}
        async with GatewayProcess(config, tmp_path) as gateway:
            answers = [await ask(gateway.port, chat(stream=True)) for _ in range(10)]
            assert {(answer.status, answer.body[-len(DONE) :]) for answer in answers} == {(200, DONE)}
            hedged = a.hits
            assert 4 <= hedged <= 10
            assert await gateway.metric("headrace_hedges_total", outcome="won") == hedged
            assert await gateway.metric("headrace_upstream_failures_total") == 0
            assert len(a.closed) == hedged
            await gateway.eventually(lambda: len(gateway.lines) == 10, "all lines")
            assert sum(line["attempts"] for line in gateway.lines) == 10 + hedged
            told = {(request.header("traceparent") or "").split("-")[2] for fake in (a, b) for request in fake.requests}
            await gateway.eventually(lambda: len(sink.of_kind(SERVER)) == 10, "all spans", timeout_s=20)
            await gateway.settled([a, b], sent=10, outcomes={"ok": 10})
        spans = sink.of_kind(CLIENT)
        lost = [span for span in spans if attributes(span).get("error.type") == "hedge_lost"]
        won = [span for span in spans if attributes(span).get("headrace.hedge")]
        assert len(lost) == len(won) == hedged
        assert not any(span.status.code for span in sink.spans)
        assert {attributes(span)["headrace.backend"] for span in won} == {b.url}
        assert {span.trace_id for span in lost} == {span.trace_id for span in won}
        assert {span.span_id.hex() for span in spans} == told
        assert len({span.span_id for span in sink.spans}) == len(sink.spans)


async def test_when_every_backend_stalls_the_budget_bounds_the_second_attempts(tmp_path: Path) -> None:
    """Forty streams at once, ten in the budget: fifty attempts at most, and nothing remains when all have left."""
    async with (
        Fake(stalled) as a,
        Fake(stalled) as b,
        GatewayProcess(
            pool(a.url, b.url, concurrency=64, retries={"hedge": {"after": "50ms"}}, timeouts=PATIENT), tmp_path
        ) as gateway,
    ):
        begun = time.monotonic()
        clients = [RawClient(gateway.port) for _ in range(40)]
        for client in clients:
            await client.__aenter__()
            await client.send(chat(stream=True))
        await gateway.eventually(lambda: a.hits + b.hits >= 45, "second attempts are made")
        await asyncio.sleep(0.5)
        assert a.hits + b.hits <= 40 + 10 + 4 + 1 + time.monotonic() - begun  # a tenth more, and one for each second
        for client in clients:
            client.reset()
        await gateway.settled([a, b], sent=40, outcomes={"client_disconnect": 40})
