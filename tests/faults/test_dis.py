"""Clients that leave, in every phase: what they leave behind. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from tests.faults.fakes import (
    DONE,
    Fake,
    FakeConnection,
    completion,
    event,
    gathering,
    healthy,
    silent,
)
from tests.faults.process import DIGEST, KEY, GatewayProcess, busy, pool, times
from tests.faults.rawclient import RawClient, ask, chat, post

pytestmark = pytest.mark.anyio

SOON_S = 2.0  # a case allows 1 s on a machine of its own


async def headless(connection: FakeConnection) -> None:
    """The head of a stream, and no event."""
    await connection.request()
    await connection.stream_head()
    await connection.wait_closed()


def leave(client: RawClient, how: str) -> float:
    """The client goes; returns when."""
    client.close() if how == "fin" else client.reset()
    return time.monotonic()


async def when_closed(gateway: GatewayProcess, fake: Fake, count: int = 1) -> float:
    """When the gateway had closed `count` connections to the backend."""
    await gateway.eventually(lambda: len(fake.closed) >= count, "the upstream request is closed")
    return max(closed.at for closed in fake.closed)


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("body_bytes", [100, 300_000])
async def test_b029_leaving_ends_a_request_that_is_not_streamed(
    gateway: GatewayProcess, a: Fake, how: str, body_bytes: int
) -> None:
    """The backend thinks, the client leaves: the upstream request is closed, the one place is free, 499 is logged.
    So it is after a large body, too."""
    a.script = silent
    async with RawClient(gateway.port) as client:
        await client.send(chat(model="one", user="u" * body_bytes))
        await gateway.eventually(lambda: a.hits, "the request is at the backend")
        left = leave(client, how)
        assert await when_closed(gateway, a) - left < SOON_S
    a.script = healthy
    begun = time.monotonic()
    assert (await ask(gateway.port, chat(model="one"))).status == 200
    assert time.monotonic() - begun < SOON_S
    await gateway.eventually(lambda: len(gateway.lines) == 2, "two lines of log")
    assert [(line["status"], line["outcome"]) for line in gateway.lines] == [(499, "client_disconnect"), (200, "ok")]
    await gateway.settled([a], sent=2)


@pytest.mark.parametrize("script", [silent, headless])
async def test_b030_leaving_before_the_first_token_ends_a_stream(
    gateway: GatewayProcess, a: Fake, script: object
) -> None:
    """No head yet, or no event yet: the upstream request is closed as soon as the client has left."""
    a.script = script  # type: ignore[assignment]
    async with RawClient(gateway.port) as client:
        await client.send(chat(stream=True))
        await gateway.eventually(lambda: a.hits, "the request is at the backend")
        await asyncio.sleep(0.05)
        left = leave(client, "fin")
        assert await when_closed(gateway, a) - left < SOON_S
    await gateway.settled([a], outcomes={"client_disconnect": 1})


async def test_a_pipelined_request_does_not_hide_that_its_client_left(gateway: GatewayProcess, a: Fake) -> None:
    """While a request runs and another one of the same connection waits behind it, leaving is still seen."""
    a.script = silent
    async with RawClient(gateway.port) as client:
        await client.send(chat() + chat())
        await gateway.eventually(lambda: a.hits, "the request is at the backend")
        left = leave(client, "fin")
        assert await when_closed(gateway, a) - left < SOON_S
    assert a.hits == 1
    await gateway.settled([a], outcomes={"client_disconnect": 1})


async def test_b031_streams_dropped_midway_are_closed_at_the_backend(tmp_path: Path) -> None:
    """1,000 streams (200 in the ordinary suite), 50 at a time, reset after 3 of 100 tokens: each is closed at the
    backend at once; descriptors, tasks and gauges are back where they were."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        for number in range(3):
            await connection.chunk(event(f"t{number}"))
        await connection.wait_closed()

    async def one() -> float:
        async with RawClient(gateway.port) as client:
            await client.send(chat(stream=True))
            await client.response(until=b"t2")
            return leave(client, "reset")

    async with Fake(script) as a, GatewayProcess(pool(a.url, concurrency=64), tmp_path) as gateway:
        rounds = times(20, 4)
        for number in rounds:
            left = await asyncio.gather(*(one() for _ in range(50)))
            assert await when_closed(gateway, a, 50 * (number + 1)) - max(left) < SOON_S
        await gateway.settled([a], outcomes={"client_disconnect": 50 * len(rounds)})


async def test_b032_every_exit_gives_its_place_back(tmp_path: Path) -> None:
    """Two places. Each way to end a request is taken 20 times (4 in the ordinary suite), two at once; after each of
    them two requests run side by side."""
    config = pool("", concurrency=2, timeouts={"headers": "500ms", "first_token": "500ms"})
    config["classes"] = {"interactive": {"max_wait": "5s"}}
    config["tenants"] = {"t": {"keys": [{"sha256": DIGEST}]}}
    async with Fake(healthy) as a:
        config["pools"]["p"]["backends"][0]["url"] = a.url
        async with GatewayProcess(config, tmp_path) as gateway:
            for exit_ in (
                invalid,
                unknown_model,
                queued,
                headless_exit,
                midway,
                at_done,
                failing,
                cut,
                stalled,
                normal,
            ):
                for _ in times(10, 2):
                    await asyncio.gather(*(exit_(gateway, a) for _ in range(2)))
                await gateway.settled([a])


AUTH = f"Authorization: Bearer {KEY}"


async def stranger(gateway: GatewayProcess, a: Fake) -> None:
    assert (await ask(gateway.port, chat("Authorization: Bearer hr-nobody"))).status == 401


async def invalid(gateway: GatewayProcess, a: Fake) -> None:
    assert (await ask(gateway.port, post(b"{", "/v1/chat/completions", AUTH))).status == 400


async def unknown_model(gateway: GatewayProcess, a: Fake) -> None:
    assert (await ask(gateway.port, chat(AUTH, model="x"))).status == 404


async def queued(gateway: GatewayProcess, a: Fake) -> None:
    """Both places are taken; what waits behind them leaves."""
    a.script = silent
    async with RawClient(gateway.port) as first, RawClient(gateway.port) as second, RawClient(gateway.port) as third:
        for client in (first, second, third):
            await client.send(chat(AUTH, stream=True))
        await asyncio.sleep(0.05)
        for client in (third, second, first):
            client.reset()


async def headless_exit(gateway: GatewayProcess, a: Fake) -> None:
    a.script = headless
    async with RawClient(gateway.port) as client:
        await client.send(chat(AUTH, stream=True))
        await asyncio.sleep(0.02)
        client.reset()


async def unfinished(connection: FakeConnection) -> None:
    """A stream that lacks nothing but its end."""
    await connection.request()
    await connection.stream_head()
    for data in (event("t0"), event("t1"), event(finish="stop"), DONE):
        await connection.chunk(data)
    await connection.wait_closed()


async def midway(gateway: GatewayProcess, a: Fake) -> None:
    a.script = unfinished
    async with RawClient(gateway.port) as client:
        await client.send(chat(AUTH, stream=True))
        await client.response(until=b"t0")
        client.reset()


async def at_done(gateway: GatewayProcess, a: Fake) -> None:
    a.script = unfinished
    async with RawClient(gateway.port) as client:
        await client.send(chat(AUTH, stream=True))
        await client.response(until=b"[DONE]")
        client.reset()


async def failing(gateway: GatewayProcess, a: Fake) -> None:
    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.answer(b"oops", "500 Oops", "text/plain")

    a.script = script
    assert (await ask(gateway.port, chat(AUTH))).status == 500


async def cut(gateway: GatewayProcess, a: Fake) -> None:
    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(event("t0"))
        connection.fin()

    a.script = script
    assert b'"error"' in (await ask(gateway.port, chat(AUTH, stream=True))).body


async def stalled(gateway: GatewayProcess, a: Fake) -> None:
    a.script = silent
    assert (await ask(gateway.port, chat(AUTH, stream=True))).status == 504


async def normal(gateway: GatewayProcess, a: Fake) -> None:
    a.script = healthy
    assert (await ask(gateway.port, chat(AUTH, stream=True))).body.endswith(DONE)


ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
)


async def test_b033_every_route_gives_its_place_back(gateway: GatewayProcess, a: Fake) -> None:
    """One place and three completed calls after each other on every route, streamed and not: none is refused, and no
    place is taken afterwards."""
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\none\r\n--x--\r\n'
    form_type = "Content-Type: multipart/form-data; boundary=x"
    sent = 0
    for path in ROUTES:
        for stream in (False, True):
            body = {"model": "one", "input": "x", "messages": [], "stream": stream}
            multipart = path.endswith("transcriptions")
            request = post(form, path, form_type) if multipart else post(body, path)
            for _ in range(3):
                assert (await ask(gateway.port, request)).status == 200, path
                sent += 1
            assert await gateway.metric("headrace_in_flight_requests") == 0, path
    async with RawClient(gateway.port) as client:
        for _ in range(12):
            assert (await client.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200
    await gateway.settled([a], sent=sent)


async def test_b035_a_backend_that_breaks_as_the_client_leaves_is_counted_once(tmp_path: Path) -> None:
    """500 times (100 in the ordinary suite) the backend resets in the same 5 ms in which the client leaves: nothing
    is left in flight, and 100 requests at once are still shared out evenly over two backends."""
    rng = Random(35)

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        await connection.chunk(event("t0"))
        await asyncio.sleep(rng.uniform(0.0, 0.005))
        connection.reset()

    async def one() -> None:
        async with RawClient(gateway.port) as client:
            await client.send(chat(stream=True))
            await client.response(until=b"t0")
            await asyncio.sleep(rng.uniform(0.0, 0.005))
            client.reset()

    async with Fake(script) as a, Fake(script) as b:
        config = pool(a.url, b.url, concurrency=100, routing="least_tokens")
        async with GatewayProcess(config, tmp_path) as gateway:
            rounds = times(50, 10)
            for _ in rounds:
                await asyncio.gather(*(one() for _ in range(10)))
            await gateway.settled([a, b], sent=10 * len(rounds))
            meet = gathering(100)
            await a.play(meet)
            await b.play(meet)
            answers = await asyncio.gather(*(ask(gateway.port, chat()) for _ in range(100)))
            assert [answer.status for answer in answers] == [200] * 100
            assert (a.hits, b.hits) == (50, 50)
            await gateway.settled([a, b])


@pytest.mark.parametrize("stream", [False, True])
async def test_b037_leaving_with_the_last_byte_loses_no_record(gateway: GatewayProcess, a: Fake, stream: bool) -> None:
    """200 requests (50 in the ordinary suite) whose clients close as they get the last byte of the body: all are
    logged, counted as good, and their tokens are counted."""
    count = len(times(200, 50))
    last = b"[DONE]\n\n" if stream else completion()[-20:]

    async def one() -> None:
        async with RawClient(gateway.port) as client:
            await client.send(chat(stream=stream))
            await client.response(until=last)
            client.reset()

    for _ in range(count // 10):
        await asyncio.gather(*(one() for _ in range(10)))
    assert await gateway.metric("headrace_tokens_total", direction="output") == count * (5 if stream else 7)
    await gateway.settled([a], outcomes={"ok": count})


async def breaking(connection: FakeConnection) -> None:
    """Two tokens, then what an engine says that dies, and then nothing more."""
    await connection.request()
    await connection.stream_head()
    for text in ("t0", "t1"):
        await connection.chunk(event(text))
    await connection.chunk(b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n')
    await connection.wait_closed()


async def test_leaving_on_an_error_frame_blames_the_backend(gateway: GatewayProcess, a: Fake) -> None:
    """Libraries hang up on an error frame, before its stream has ended: it failed all the same, and its backend did."""
    await a.play(breaking)
    for _ in range(5):
        async with RawClient(gateway.port) as client:
            await client.send(chat(model="one", stream=True))
            assert (await client.response(until=b"EngineCore died")).status == 200
            client.reset()
    await gateway.eventually(lambda: len(gateway.lines) == 5, "five lines of log")
    assert {line["outcome"] for line in gateway.lines} == {"upstream_error"}
    assert await gateway.metric("headrace_upstream_failures_total", backend=a.url, reason="upstream_error") == 5
    await gateway.settled([a], sent=5)


async def test_b038_a_client_that_leaves_as_it_is_dispatched_leaves_its_place(gateway: GatewayProcess, a: Fake) -> None:
    """One place. 3,000 requests (300 in the ordinary suite) whose clients leave within 4 ms, whatever has happened to
    them until then; the next one is served at once, and the backend has none unfinished."""
    rng = Random(38)
    a.script = thinking
    for number in times(3000, 300):
        async with RawClient(gateway.port) as client:
            await client.send(chat(model="one", stream=number % 2 == 0))
            await asyncio.sleep(rng.uniform(0.0, 0.004))
            client.reset()
    begun = time.monotonic()
    assert (await ask(gateway.port, chat(model="one"))).status == 200
    assert time.monotonic() - begun < 1.0 * busy()
    await gateway.settled([a])


async def thinking(connection: FakeConnection) -> None:
    """Answers after 2 ms."""
    while True:
        await connection.request()
        await asyncio.sleep(0.002)
        await connection.answer(completion())
