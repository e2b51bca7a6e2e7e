"""Faults after the first byte, and at the moment of committing a status. Each test is named by its public case."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.faults.fakes import (
    DONE,
    Fake,
    FakeConnection,
    event,
    healthy,
    streaming,
)
from tests.faults.process import GatewayProcess
from tests.faults.rawclient import RawClient, Response, ask, chat

pytestmark = pytest.mark.anyio

REFUSED = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":"nope"}}'


def frame(response: Response) -> dict[str, object]:
    """The error that the last event of a stream carries; there is one error, and nothing behind it."""
    *_, last, rest = response.body.split(b"\n\n")
    assert rest == b""
    assert response.body.count(b'"error"') == 1
    assert b"[DONE]" not in response.body
    told = Response(pieces=[(0.0, last.removeprefix(b"data: "))])
    return told.error()


@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_b019_a_stream_without_an_event_is_an_error(gateway: GatewayProcess, a: Fake, framing: str) -> None:
    """200 and event-stream headers, then FIN: a 502 in JSON, no [DONE], no chunk made up; counted as truncated."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        coding = {"transfer_encoding": "chunked"} if framing == "chunked" else {}
        await connection.head(content_type="text/event-stream", **coding)
        await asyncio.sleep(0.02)
        connection.fin()

    a.script = script
    response = await ask(gateway.port, chat(stream=True))
    assert response.status == 502
    assert response.header("content-type") == "application/json"
    assert response.error()["code"] == "upstream_error"
    assert b"[DONE]" not in response.body
    assert await gateway.outcomes() == {"upstream_truncated": 1}
    await gateway.settled([a])


@pytest.mark.parametrize("end", ["fin", "reset"])
async def test_b020_b027_a_stream_cut_short_ends_with_one_error_frame(
    gateway: GatewayProcess, a: Fake, end: str
) -> None:
    """40 of 60 events, then FIN or RST: exactly these 40, then one error frame of a server's type, no [DONE]; the
    backend's failure is counted once, as truncated."""
    relayed = asyncio.Event()  # a reset overtakes what the gateway has not read yet

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.stream_head()
        for number in range(40):
            await connection.chunk(event(f"t{number}"))
        await relayed.wait()
        connection.fin() if end == "fin" else connection.reset()

    a.script = script
    async with RawClient(gateway.port) as client:
        await client.send(chat(stream=True))
        response = await client.response(until=b"t39")
        relayed.set()
        await client.read(response)
    assert response.status == 200
    assert response.complete
    assert response.body.startswith(b"".join(event(f"t{number}") for number in range(40)) + b'data: {"error":')
    assert frame(response)["type"] == "api_error"
    assert frame(response)["code"] == "upstream_error"
    assert await gateway.outcomes() == {"upstream_truncated": 1}
    assert await gateway.metric("headrace_upstream_failures_total", reason="upstream_truncated") == 1
    await gateway.settled([a])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answered", [False, True])
async def test_b027_what_breaks_before_the_commit_is_a_servers_error(
    gateway: GatewayProcess, a: Fake, stream: bool, answered: bool
) -> None:
    """A break before anything was relayed, with or without a response head, is a 502 of a server's type, never a
    400."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        if answered:
            kind = "text/event-stream" if stream else "application/json"
            await connection.head(content_type=kind, content_length="1000")
            await connection.send(b'data: {"id":')
            await asyncio.sleep(0.02)
        connection.reset()

    a.script = script
    response = await ask(gateway.port, chat(stream=stream))
    assert response.status == 502
    assert response.error()["type"] == "api_error"
    assert sum((await gateway.outcomes()).values()) == 1
    assert "ok" not in await gateway.outcomes()
    await gateway.settled([a])


async def test_b022_an_error_event_reaches_the_client_and_is_counted(gateway: GatewayProcess, a: Fake) -> None:
    """Role, two tokens, an error event, [DONE]: the error passes verbatim; outcome upstream_error; what is billed is
    what was delivered; the backend has failed once."""
    events = (
        event(role="assistant"),
        event("t0"),
        event("t1"),
        b'data: {"error":{"message":"queue full","code":503}}\n\n',
    )
    a.script = streaming(*events, DONE)
    response = await ask(gateway.port, chat(stream=True))
    assert response.status == 200
    assert response.body.startswith(b"".join(events))
    assert response.body.count(b'"error"') == 1
    assert await gateway.outcomes() == {"upstream_error": 1}
    assert await gateway.metric("headrace_tokens_total", direction="output") == 2
    assert await gateway.metric("headrace_upstream_failures_total", reason="upstream_error") == 1
    await gateway.settled([a])


async def test_a_long_error_as_the_first_event_is_told_whole(gateway: GatewayProcess, a: Fake) -> None:
    """Engines quote the prompt that they refuse: the client gets that refusal and status, and nobody else is asked."""
    message = "too long: " + "x" * 10_000
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    a.script = streaming(b"data: " + json.dumps(body).encode() + b"\n\n", DONE)
    response = await ask(gateway.port, chat(stream=True))
    assert (response.status, response.error()["message"]) == (400, message)
    assert a.hits == 1
    await gateway.settled([a])


@pytest.mark.parametrize("framing", ["length", "chunked", "late"])
async def test_b024_a_refused_stream_keeps_the_backends_status_and_body(
    gateway: GatewayProcess, a: Fake, framing: str
) -> None:
    """stream:true answered with 4xx or 5xx and JSON, with a length, in chunks, or after 1.5 s: the client gets that
    status, type and body, never a 200."""

    async def script(connection: FakeConnection) -> None:
        while True:
            status = (await connection.request()).json()["metadata"]["status"]
            await asyncio.sleep(1.5 if framing == "late" else 0)
            if framing == "chunked":
                await connection.head(f"{status} Nope", content_type="application/json", transfer_encoding="chunked")
                await connection.chunk(REFUSED[:10])
                await connection.chunk(REFUSED[10:])
                await connection.last_chunk()
            else:
                await connection.answer(REFUSED, f"{status} Nope")

    a.script = script
    statuses = (400, 401, 404, 413, 422, 429, 500, 503)
    requests = [chat(stream=True, metadata={"status": status}) for status in statuses]
    responses = await asyncio.gather(*(ask(gateway.port, request) for request in requests))
    assert tuple(response.status for response in responses) == statuses
    assert {response.header("content-type") for response in responses} == {"application/json"}
    assert {response.body for response in responses} == {REFUSED}
    assert await gateway.outcomes() == {"upstream_rejected": 5, "upstream_error": 3}
    await gateway.settled([a])


@pytest.mark.parametrize("model", ["m", "two"])
async def test_b025_events_that_come_with_the_end_are_not_lost(
    gateway: GatewayProcess, a: Fake, b: Fake, model: str
) -> None:
    """Head, two events and FIN in one segment: both events and an error frame, or a whole answer from the other
    backend; never a 502 that swallows them, never both."""
    two = event("a0") + event("a1")

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await connection.send(head + b"%x\r\n%b\r\n" % (len(two), two))
        connection.fin()

    a.script = script
    broken = 0
    for _ in range(2):  # in turn: one of them goes to `a`
        response = await ask(gateway.port, chat(stream=True, model=model))
        assert response.status == 200
        if b"a0" in response.body:
            broken += 1
            assert response.body.startswith(two)
            frame(response)
        else:
            assert response.body.endswith(DONE)
    assert broken == (2 if model == "m" else 1)
    assert b.hits == (0 if model == "m" else 1)
    await gateway.settled([a, b], sent=2)


async def test_b026_a_malformed_event_does_not_end_a_healthy_stream(gateway: GatewayProcess, a: Fake) -> None:
    """A broken JSON line and one of invalid UTF-8 among 60 tokens: all of it passes unchanged; two parse errors."""
    events = [event(f"t{number}") for number in range(60)]
    events.insert(9, b'data: {"choices":[{"delta":{"con\n\n')
    events.insert(30, b"data: \xff\xfe\n\n")
    events += [event(finish="stop"), DONE]
    a.script = streaming(*events)
    response = await ask(gateway.port, chat(stream=True))
    assert response.body == b"".join(events)
    assert await gateway.outcomes() == {"ok": 1}
    assert await gateway.metric("headrace_parse_errors_total") == 2
    assert await gateway.metric("headrace_tokens_total", direction="output") == 60
    await gateway.settled([a])


async def test_b028_a_refusal_that_is_no_openai_error_passes_once(gateway: GatewayProcess, a: Fake, b: Fake) -> None:
    """422 with a body of the engine's own: the same status and body, and no second try elsewhere."""

    async def script(connection: FakeConnection) -> None:
        while True:
            await connection.request()
            await connection.answer(b'{"message":"x"}', "422 Unprocessable Entity")

    a.script = b.script = script
    response = await ask(gateway.port, chat(model="two"))
    assert (response.status, response.body) == (422, b'{"message":"x"}')
    assert a.hits + b.hits == 1
    assert await gateway.outcomes() == {"upstream_rejected": 1}
    await gateway.settled([a, b])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [b"", b"null"])
async def test_b028_an_empty_success_passes_and_is_counted_as_bad(
    gateway: GatewayProcess, a: Fake, body: bytes, stream: bool
) -> None:
    """200 with no body, or with `null`: it passes as it is, and the outcome says that it was no answer."""

    async def script(connection: FakeConnection) -> None:
        await connection.request()
        await connection.answer(body)

    a.script = script
    response = await ask(gateway.port, chat(stream=stream))
    assert (response.status, response.body) == (200, body)
    assert await gateway.outcomes() == {"upstream_bad_response": 1}
    await gateway.settled([a])


async def test_a_healthy_stream_passes(gateway: GatewayProcess, a: Fake) -> None:
    """The harness itself: five tokens, usage counted, the connection kept."""
    a.script = healthy
    response = await ask(gateway.port, chat(stream=True))
    assert response.body.endswith(DONE)
    assert b"usage" not in response.body
    assert await gateway.metric("headrace_tokens_total", direction="output") == 5
    response = await ask(gateway.port, chat())
    assert response.status == 200
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    assert a.accepts == 1
    assert await gateway.outcomes() == {"ok": 2}
    await gateway.settled([a])
